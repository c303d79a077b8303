//! The address of a server, `redis://HOST:PORT/DB`, `rediss://…`, `unix:///PATH`, and the login there.
//!
//! A user or a password in the address is refused: all users of the host can see arguments, and arguments get into
//! shell histories and logs. So an address can always be shown.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, fs};

use super::refusals::SetupError;

/// The default port.
const DEFAULT_PORT: u16 = 6379;

/// The address of a server, without any secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerUrl {
    place: Place,
    database: u32,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// On a TCP port. `tls` tells whether it uses TLS from the first byte.
    Tcp {
        /// A name or an address; IPv6 without its brackets.
        host: String,
        /// The port, never 0.
        port: u16,
        /// Whether the scheme is `rediss://`.
        tls: bool,
    },
    /// On a Unix socket.
    Unix(PathBuf),
}

impl ServerUrl {
    /// A server on this host and port, without TLS, database 0.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self { place: Place::Tcp { host: host.into(), port, tls: false }, database: 0 }
    }

    /// A server on this host and port that uses TLS if `other` does.
    pub(super) fn tcp_like(other: &Self, host: &str, port: u16) -> Self {
        Self { place: Place::Tcp { host: host.to_owned(), port, tls: other.is_tls() }, database: 0 }
    }

    /// Where the server listens.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Host (IPv6 without brackets) and port, unless the address is a Unix socket.
    pub fn host_and_port(&self) -> Option<(&str, u16)> {
        match &self.place {
            Place::Tcp { host, port, .. } => Some((host, *port)),
            Place::Unix(_) => None,
        }
    }

    /// Whether the server uses TLS.
    pub fn is_tls(&self) -> bool {
        matches!(self.place, Place::Tcp { tls: true, .. })
    }

    /// The number of the database to select; 0 unless the address names another.
    pub fn database(&self) -> u32 {
        self.database
    }

    /// Whether the address is valid on this host only: a Unix socket, or a loopback host.
    pub fn is_local_only(&self) -> bool {
        match &self.place {
            Place::Unix(_) => true,
            Place::Tcp { host, .. } => {
                let address = host.parse::<std::net::IpAddr>();
                host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
            }
        }
    }
}

impl FromStr for ServerUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        if text.bytes().any(|byte| byte.is_ascii_control()) {
            return Err(UrlError::Control);
        }
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::NoScheme)?;
        match scheme.to_ascii_lowercase().as_str() {
            "redis" | "valkey" => parse_tcp(rest, false),
            "rediss" | "valkeys" => parse_tcp(rest, true),
            "unix" => parse_unix(rest),
            _ => Err(UrlError::Scheme(scheme.to_owned())),
        }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Unix(path) => return write!(f, "unix://{}", path.display()),
            Place::Tcp { host, port, tls } => {
                let scheme = if *tls { "rediss" } else { "redis" };
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "{scheme}://{open}{host}{close}:{port}")?;
            }
        }
        match self.database {
            0 => Ok(()),
            database => write!(f, "/{database}"),
        }
    }
}

/// Why an address is not valid. No variant contains text that may be a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// There is no `://`.
    #[error("an address must begin with redis://, rediss:// (TLS) or unix://")]
    NoScheme,
    /// The scheme is unknown.
    #[error("unknown scheme {0}://: use redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH")]
    Scheme(String),
    /// The address contains `user:password@`.
    #[error(
        "an address must not contain a user or password, because all users of this host can see it: \
         use --user and --password-file, or the environment variable REMORA_PASSWORD"
    )]
    Credentials,
    /// There is no host.
    #[error("the address has no host")]
    NoHost,
    /// The host has an unclosed bracket, is an IPv6 address without brackets, or has an invalid character.
    #[error(
        "the host is not valid: use a name, an IPv4 address, or an IPv6 address in brackets, as in redis://[::1]:6379"
    )]
    Host,
    /// The port is not a number from 1 to 65535.
    #[error("the port must be a number from 1 to 65535")]
    Port,
    /// The database is not a number.
    #[error("only a database number may follow the port, as in redis://HOST:PORT/0")]
    Database,
    /// The path of the socket is not absolute.
    #[error("the path of a socket must be absolute, as in unix:///run/redis/redis.sock")]
    Path,
    /// There is a control character.
    #[error("the address contains a control character")]
    Control,
}

fn parse_unix(path: &str) -> Result<ServerUrl, UrlError> {
    if !path.starts_with('/') || path.len() < 2 {
        return Err(UrlError::Path);
    }
    Ok(ServerUrl { place: Place::Unix(path.into()), database: 0 })
}

fn parse_tcp(rest: &str, tls: bool) -> Result<ServerUrl, UrlError> {
    if rest.contains('@') {
        return Err(UrlError::Credentials);
    }
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = split_host_port(authority)?;
    let database = match database {
        "" => 0,
        number if number.bytes().all(|byte| byte.is_ascii_digit()) => number.parse().map_err(|_| UrlError::Database)?,
        _ => return Err(UrlError::Database),
    };
    Ok(ServerUrl { place: Place::Tcp { host, port, tls }, database })
}

fn split_host_port(authority: &str) -> Result<(String, u16), UrlError> {
    if let Some(bracketed) = authority.strip_prefix('[') {
        let (host, rest) = bracketed.split_once(']').ok_or(UrlError::Host)?;
        host.parse::<std::net::Ipv6Addr>().map_err(|_| UrlError::Host)?;
        let port = match rest {
            "" => DEFAULT_PORT,
            rest => parse_port(rest.strip_prefix(':').ok_or(UrlError::Port)?)?,
        };
        return Ok((host.to_owned(), port));
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, parse_port(port)?),
        Some(_) => return Err(UrlError::Host),
        None => (authority, DEFAULT_PORT),
    };
    match host {
        "" => Err(UrlError::NoHost),
        _ if host.chars().all(|letter| letter.is_alphanumeric() || "-._".contains(letter)) => {
            Ok((host.to_owned(), port))
        }
        _ => Err(UrlError::Host),
    }
}

fn parse_port(text: &str) -> Result<u16, UrlError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port != 0 => Ok(port),
        _ => Err(UrlError::Port),
    }
}

/// A host (name or address) and a port, written `HOST:PORT` or `[IPV6]:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// Name or address; IPv6 without brackets.
    pub host: String,
    /// The port, never 0.
    pub port: u16,
}

impl std::str::FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let has_port = text.rsplit_once(':').is_some_and(|(host, _)| !host.contains(':') || host.ends_with(']'));
        if !has_port || text.contains('/') {
            return Err("expected HOST:PORT, as in db1:6379 or [::1]:6379".into());
        }
        // The rules are those of a server's address, without its scheme.
        let url = format!("redis://{text}").parse::<ServerUrl>().map_err(|error| error.to_string())?;
        let (host, port) = url.host_and_port().ok_or("expected HOST:PORT")?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for HostPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

// The login at a server: an ACL user and a password. The password never appears in an argument, a log or an error.

/// The environment variable that holds the password if no file is given.
pub const PASSWORD_VARIABLE: &str = "REMORA_PASSWORD";

/// The most bytes of a password file that are read, far above any password in use: a wrong path may name a large file.
const PASSWORD_FILE_BYTES: u64 = 64 * 1024;

/// Mode bits that let users other than the owner and its group read or write a file.
const OTHERS: u32 = 0o007;

/// User and password. Without a password no `AUTH` is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The ACL user; `None` means the server's `default` user. Servers allow any bytes but spaces and NUL.
    pub user: Option<Vec<u8>>,
    /// Its password.
    pub password: Option<Password>,
}

impl Credentials {
    /// The login that the options describe: the password is read from the file if one is given, else from the
    /// environment.
    pub fn gather(user: Option<&str>, password_file: Option<&Path>) -> Result<Self, SetupError> {
        let password = match password_file {
            Some(path) => Some(Password::read_file(path)?),
            None => std::env::var_os(PASSWORD_VARIABLE)
                .map(OsString::into_vec)
                .filter(|bytes| !bytes.is_empty())
                .map(Password),
        };
        if let (Some(user), None) = (user, &password) {
            return Err(SetupError::UserWithoutPassword { user: user.to_owned() });
        }
        Ok(Self { user: user.map(|user| user.as_bytes().to_vec()), password })
    }
}

/// A password: any bytes, as servers allow them. Debug output hides it; only [`Password::expose`] returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(Vec<u8>);

impl Password {
    /// Makes a password of these bytes.
    pub fn new(password: impl Into<Vec<u8>>) -> Self {
        Self(password.into())
    }

    /// Reads the first line of a file that only its owner and group can read.
    pub fn read_file(path: &Path) -> Result<Self, SetupError> {
        let unreadable = |cause| SetupError::File { what: "password file", path: path.to_owned(), cause };
        let file = fs::File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        if mode & OTHERS != 0 {
            return Err(SetupError::OpenToAll { what: "password file", path: path.to_owned(), mode: mode & 0o777 });
        }
        let mut bytes = Vec::new();
        file.take(PASSWORD_FILE_BYTES).read_to_end(&mut bytes).map_err(unreadable)?;
        let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return Err(SetupError::Empty { what: "password file", path: path.to_owned() });
        }
        Ok(Self(line.to_vec()))
    }

    /// The password itself, for the `AUTH` command.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(…)")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_read_and_shown_in_one_form() {
        let table = [
            ("redis://db1", "redis://db1:6379"),
            ("redis://db1:7000", "redis://db1:7000"),
            ("REDIS://db1:7000/", "redis://db1:7000"),
            ("redis://10.0.0.1:7000/3", "redis://10.0.0.1:7000/3"),
            ("redis://[::1]", "redis://[::1]:6379"),
            ("rediss://[fe80::2]:6390/15", "rediss://[fe80::2]:6390/15"),
            ("valkey://db-1.example_net", "redis://db-1.example_net:6379"),
            ("valkeys://db1", "rediss://db1:6379"),
            ("unix:///run/redis/redis.sock", "unix:///run/redis/redis.sock"),
        ];
        for (typed, shown) in table {
            assert_eq!(typed.parse::<ServerUrl>().unwrap().to_string(), shown, "{typed}");
        }
    }

    #[test]
    fn what_is_not_an_address_is_refused_for_its_own_reason() {
        let table = [
            ("db1:6379", UrlError::NoScheme),
            ("http://db1", UrlError::Scheme("http".into())),
            ("redis://user:secret@db1", UrlError::Credentials),
            ("redis://:secret@db1", UrlError::Credentials),
            ("redis://user@[::1]:6379", UrlError::Credentials),
            ("redis://", UrlError::NoHost),
            ("redis://:6379", UrlError::NoHost),
            ("redis://::1", UrlError::Host),
            ("redis://[::1", UrlError::Host),
            ("redis://[db1]", UrlError::Host),
            ("redis://d b", UrlError::Host),
            ("redis://db1:0", UrlError::Port),
            ("redis://db1:+80", UrlError::Port),
            ("redis://db1:65536", UrlError::Port),
            ("redis://db1:", UrlError::Port),
            ("redis://[::1]6379", UrlError::Port),
            ("redis://db1/one", UrlError::Database),
            ("redis://db1/1/2", UrlError::Database),
            ("redis://db1/99999999999", UrlError::Database),
            ("unix://relative.sock", UrlError::Path),
            ("unix:///", UrlError::Path),
            ("redis://db1\r\nSET", UrlError::Control),
        ];
        for (typed, error) in table {
            assert_eq!(typed.parse::<ServerUrl>(), Err(error), "{typed}");
        }
    }

    #[test]
    fn loopback_and_sockets_are_of_no_use_elsewhere() {
        for local in ["redis://127.0.0.5", "redis://localhost", "redis://[::1]", "unix:///s"] {
            assert!(local.parse::<ServerUrl>().unwrap().is_local_only(), "{local}");
        }
        for reachable in ["redis://10.0.0.1", "redis://db1", "redis://[2001:db8::1]"] {
            assert!(!reachable.parse::<ServerUrl>().unwrap().is_local_only(), "{reachable}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_or_an_error_but_no_panic(text in "((redis|rediss|unix)://)?.{0,40}") {
            let _ = text.parse::<ServerUrl>();
        }

        #[test]
        fn what_is_shown_reads_back_as_the_same(host in "[a-z][a-z0-9.-]{0,20}", port in 1u16.., database in 0u32..64, tls: bool) {
            let url = ServerUrl { place: Place::Tcp { host, port, tls }, database };
            prop_assert_eq!(url.to_string().parse::<ServerUrl>(), Ok(url));
        }

        #[test]
        fn a_password_never_comes_back_in_the_error(password in "[a-z]{12}") {
            let error = format!("redis://user:{password}@host:6379").parse::<ServerUrl>().unwrap_err();
            prop_assert!(!error.to_string().contains(&password));
        }
    }

    #[test]
    fn a_host_and_a_port_are_both_needed() {
        assert_eq!("db1:6379".parse::<HostPort>().unwrap(), HostPort { host: "db1".into(), port: 6379 });
        assert_eq!("[::1]:80".parse::<HostPort>().unwrap().to_string(), "[::1]:80");
        for wrong in ["db1", "[::1]", "::1", "db1:", "db1:0", "db1:80/2", ":80", "user@db1:80", "redis://db1:80"] {
            assert!(wrong.parse::<HostPort>().is_err(), "{wrong}");
        }
    }

    fn file_with(content: impl AsRef<[u8]>, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn the_first_line_of_the_file_is_the_password() {
        let file = file_with("se cret\nnot this\n", 0o640);
        assert_eq!(Password::read_file(file.path()).unwrap().expose(), b"se cret");
        let bytes = file_with(b"\xFF\x80 \"'\\\r\nnot this", 0o600);
        assert_eq!(Password::read_file(bytes.path()).unwrap().expose(), b"\xFF\x80 \"'\\");
    }

    #[test]
    fn a_file_that_everybody_may_read_is_refused() {
        let file = file_with("secret\n", 0o644);
        let error = Password::read_file(file.path()).unwrap_err().to_string();
        assert!(error.contains("chmod") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_empty_file_is_refused() {
        let file = file_with("\n", 0o600);
        assert!(matches!(Password::read_file(file.path()), Err(SetupError::Empty { .. })));
    }

    #[test]
    fn a_user_without_password_is_refused_rather_than_ignored() {
        // Has no meaning if the environment sets the variable.
        if std::env::var_os(PASSWORD_VARIABLE).is_none() {
            let error = Credentials::gather(Some("copier"), None).unwrap_err();
            assert!(matches!(error, SetupError::UserWithoutPassword { .. }));
        }
    }

    #[test]
    fn a_password_does_not_show_itself() {
        let credentials = Credentials { user: Some("u".into()), password: Some(Password::new("hunter2")) };
        assert!(!format!("{credentials:?}").contains("hunter2"));
    }
}
