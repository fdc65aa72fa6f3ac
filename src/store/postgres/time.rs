//! Instants and durations in the forms of PostgreSQL: exact to the microsecond, and no arithmetic in
//! statements.

use std::error::Error;
use std::time::Duration;

use bytes::BytesMut;

use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::record::Timestamp;

/// A `timestamp with time zone`: microseconds since 2000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Instant(i64);

impl Instant {
    pub(super) fn timestamp(self) -> Timestamp {
        // What lies before 1970 is as over as 1970. `infinity`, which only an operator can have
        // written, is the greatest number and stays far away.
        let since_1970 = i128::from(self.0) + EPOCH;
        Timestamp::from_micros(u64::try_from(since_1970).unwrap_or(0))
    }

    pub(super) fn of(timestamp: Timestamp) -> Self {
        let since_2000 = i128::from(timestamp.as_micros()) - EPOCH;
        Self(i64::try_from(since_2000).unwrap_or(i64::MAX))
    }

    /// How far this is ahead of `now`; zero if it is not.
    pub(super) fn ahead_of(self, now: Self) -> Duration {
        let ahead = i128::from(self.0) - i128::from(now.0);
        Duration::from_micros(u64::try_from(ahead).unwrap_or(0))
    }
}

impl<'a> FromSql<'a> for Instant {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TIMESTAMPTZ
    }
}

impl ToSql for Instant {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

/// An `interval` without days and months, which have no fixed length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interval(i64);

impl Interval {
    pub(super) fn of(duration: Duration) -> Self {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        Self(micros.min(LONGEST))
    }
}

impl ToSql for Interval {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0.to_be_bytes());
        // Days and months.
        out.extend_from_slice(&[0; 8]);
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::INTERVAL
    }

    to_sql_checked!();
}

/// 1970 to 2000, in microseconds.
const EPOCH: i128 = 946_684_800_000_000;
/// 100,000 years, in microseconds: as good as for ever, and its end is still a date that PostgreSQL
/// knows.
const LONGEST: i64 = 100_000 * 365 * 24 * 60 * 60 * 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_count_from_two_thousand_and_timestamps_from_seventy() {
        assert_eq!(Instant(0).timestamp().as_micros(), 946_684_800_000_000);
        assert_eq!(Instant(-946_684_800_000_000).timestamp().as_micros(), 0);
        for micros in [0, 1, 946_684_800_000_001, 1_900_000_000_000_000] {
            let timestamp = Timestamp::from_micros(micros);
            assert_eq!(Instant::of(timestamp).timestamp(), timestamp);
        }
    }

    #[test]
    fn the_ends_of_time_do_not_wrap() {
        assert_eq!(Instant(i64::MIN).timestamp().as_micros(), 0);
        assert!(Instant(i64::MAX).timestamp() > Timestamp::from_micros(i64::MAX as u64));
        assert_eq!(
            Instant::of(Timestamp::from_micros(u64::MAX)),
            Instant(i64::MAX)
        );
        assert_eq!(
            Instant(i64::MIN).ahead_of(Instant(i64::MAX)),
            Duration::ZERO
        );
        assert_eq!(Interval::of(Duration::MAX), Interval(LONGEST));
    }

    #[test]
    fn a_lease_that_is_over_has_nothing_left() {
        assert_eq!(Instant(7).ahead_of(Instant(5)), Duration::from_micros(2));
        assert_eq!(Instant(5).ahead_of(Instant(5)), Duration::ZERO);
        assert_eq!(Instant(4).ahead_of(Instant(5)), Duration::ZERO);
    }
}
