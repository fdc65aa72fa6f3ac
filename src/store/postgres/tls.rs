//! Reads the connection URL, and sets up TLS as it says.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Config;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::{StoreError, StoreErrorKind};

/// What a URL says.
pub(super) struct Target {
    pub(super) config: Config,
    pub(super) tls: MakeRustlsConnect,
}

impl Target {
    /// # Errors
    ///
    /// `Other`, and never with a piece of the URL in it: it holds a password.
    pub(super) fn read(url: &str) -> Result<Self, StoreError> {
        let (url, options) = Options::taken_from(url);
        let mut config: Config = url.parse().map_err(|_| {
            refused(
                "the URL cannot be read: it has to be \
                 postgres://user:password@host:port/database?option=value, with other characters \
                 than letters and digits percent-encoded, and options that libpq and tokio-postgres \
                 know",
            )
        })?;
        if config.get_application_name().is_none() {
            config.application_name(APPLICATION);
        }
        if options.always {
            config.ssl_mode(SslMode::Require);
        }
        let roots = match &options.roots {
            Some(file) => roots_of(Path::new(file))?,
            // Nothing is read where nothing is verified.
            None if config.get_ssl_mode() == SslMode::Disable => RootCertStore::empty(),
            None => roots_of_the_platform(),
        };
        Ok(Self {
            config,
            tls: connector(roots)?,
        })
    }
}

/// Options of libpq that the driver does not know.
#[derive(Default)]
struct Options {
    roots: Option<String>,
    always: bool,
}

impl Options {
    /// Takes them out of a URL. Where TLS is used, the certificate and the host's name in it are
    /// always verified, so that `verify-ca` and `verify-full` ask for no more than `require`.
    fn taken_from(url: &str) -> (String, Self) {
        let mut options = Self::default();
        // As the driver reads it: a password may hold a question mark.
        let host = url.find('@').unwrap_or(0);
        let Some(query) = url[host..].find('?') else {
            return (url.to_owned(), options);
        };
        let (base, query) = (&url[..host + query], &url[host + query + 1..]);
        let left: Vec<&str> = query
            .split('&')
            .filter(|option| match option.split_once('=') {
                Some(("sslrootcert", file)) => {
                    options.roots = Some(decoded(file));
                    false
                }
                Some(("sslmode", "verify-full" | "verify-ca")) => {
                    options.always = true;
                    false
                }
                _ => true,
            })
            .collect();
        let url = match left.is_empty() {
            true => base.to_owned(),
            false => format!("{base}?{}", left.join("&")),
        };
        (url, options)
    }
}

fn connector(roots: RootCertStore) -> Result<MakeRustlsConnect, StoreError> {
    // Named, so that it depends on no setting of the process.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| refused("TLS cannot be set up").with_source(error))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}

fn roots_of(file: &Path) -> Result<RootCertStore, StoreError> {
    let unreadable = || refused("the file that sslrootcert names holds no readable certificate");
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(file)
        .map_err(|error| unreadable().with_source(error.to_string()))?;
    for certificate in certificates {
        let certificate =
            certificate.map_err(|error| unreadable().with_source(error.to_string()))?;
        roots
            .add(certificate)
            .map_err(|error| unreadable().with_source(error))?;
    }
    match roots.is_empty() {
        true => Err(unreadable()),
        false => Ok(roots),
    }
}

/// None is no error yet: the server may not ask for TLS.
fn roots_of_the_platform() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = after.first_chunk::<2>().filter(|_| byte == b'%');
        let escaped = escaped.and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn refused(message: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Other, message)
}

/// What the server's administrator sees in pg_stat_activity.
const APPLICATION: &str = env!("CARGO_PKG_NAME");

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(url: &str) -> SslMode {
        Target::read(url)
            .unwrap_or_else(|error| panic!("{error}"))
            .config
            .get_ssl_mode()
    }

    #[test]
    fn the_url_says_whether_tls_is_used() {
        assert_eq!(mode("postgres://u@h/d"), SslMode::Prefer);
        assert_eq!(mode("postgres://u@h/d?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("postgres://u@h/d?sslmode=require"), SslMode::Require);
        assert_eq!(
            mode("postgres://u@h/d?sslmode=verify-full"),
            SslMode::Require
        );
        assert_eq!(
            mode("postgres://u@h/d?connect_timeout=5&sslmode=verify-ca&channel_binding=require"),
            SslMode::Require
        );
    }

    #[test]
    fn the_options_of_libpq_are_taken_out_and_decoded() {
        let (url, options) =
            Options::taken_from("postgres://u@h/d?sslrootcert=%2Fa%20b%zz.pem&application_name=x");
        assert_eq!(url, "postgres://u@h/d?application_name=x");
        assert_eq!(options.roots.as_deref(), Some("/a b%zz.pem"));
        let (url, _) = Options::taken_from("postgres://u@h/d?sslmode=verify-full");
        assert_eq!(url, "postgres://u@h/d");
        let (url, options) = Options::taken_from("postgres://u:a?sslmode=verify-ca&b@h/d?a=b");
        assert_eq!(url, "postgres://u:a?sslmode=verify-ca&b@h/d?a=b");
        assert!(!options.always);
    }

    #[test]
    fn no_error_shows_the_password() {
        for url in [
            "postgres://u:canary@h:port/d",
            "postgres://u:can?ary@h/d?x=y",
            "postgres://u:canary@h/d?canary=1",
            "postgres://u:canary@h/d?sslmode=canary",
            "postgres://u:canary@h/d?sslrootcert=/no/such/file",
            "canary",
            "http://canary",
        ] {
            let Err(error) = Target::read(url) else {
                panic!("{url} was accepted");
            };
            let text = format!("{error} {error:?}");
            assert!(!text.contains("canary") && !text.contains("ary@"), "{text}");
        }
    }
}
