//! Reading `Retry-After` (RFC 9110 section 10.2.3).

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, RETRY_AFTER};

/// How long the server wants to be left alone; `None` if it does not say, or not in a form that can
/// be read, or for longer than anybody would wait.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = text(headers, &RETRY_AFTER)?;
    let after = if text.bytes().all(|byte| byte.is_ascii_digit()) {
        Duration::from_secs(text.parse().ok()?)
    } else {
        let then = httpdate::parse_http_date(text).ok()?;
        // By the server's clock where it shows it: ours may be wrong.
        let shown =
            self::text(headers, &DATE).and_then(|date| httpdate::parse_http_date(date).ok());
        let now = shown.unwrap_or_else(own_clock);
        // A time that is over is a time to come now.
        then.duration_since(now).unwrap_or_default()
    };
    (after <= LONGEST).then_some(after)
}

fn text<'h>(headers: &'h HeaderMap, name: &http::HeaderName) -> Option<&'h str> {
    let value = headers.get(name)?.as_bytes().trim_ascii();
    (!value.is_empty())
        .then(|| std::str::from_utf8(value).ok())
        .flatten()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a date in a header can be compared with nothing else"
)]
fn own_clock() -> SystemTime {
    SystemTime::now()
}

/// A day. What says more is a mistake.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn read(after: &'static str, date: Option<&'static str>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static(after));
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_static(date));
        }
        retry_after(&headers)
    }

    #[test]
    fn seconds_and_dates_are_read() {
        assert_eq!(read("0", None), Some(Duration::ZERO));
        assert_eq!(read(" 120 ", None), Some(Duration::from_secs(120)));
        let now = Some("Fri, 31 Dec 1999 23:59:30 GMT");
        assert_eq!(
            read("Fri, 31 Dec 1999 23:59:59 GMT", now),
            Some(Duration::from_secs(29))
        );
        assert_eq!(
            read("Fri, 31 Dec 1999 23:59:00 GMT", now),
            Some(Duration::ZERO)
        );
        // Without the server's clock it is ours that says that this is over.
        assert_eq!(
            read("Fri, 31 Dec 1999 23:59:59 GMT", None),
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn what_is_negative_or_absurd_is_no_hint() {
        for after in [
            "",
            "-1",
            "+1",
            "1.5",
            "soon",
            "86401",
            "99999999999999999999",
        ] {
            assert_eq!(read(after, None), None, "{after}");
        }
        let now = Some("Fri, 31 Dec 1999 23:59:30 GMT");
        assert_eq!(read("Fri, 31 Dec 2049 23:59:59 GMT", now), None);
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }
}
