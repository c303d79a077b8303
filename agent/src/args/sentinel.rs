//! The options that name the Sentinels of a group of servers.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::TypedValueParser;
use clap::error::{Error, ErrorKind};
use clap::{Arg, Args, Command};

use super::HostPort;
use crate::exit::Failure;
use crate::sentinel::{MOST_SENTINELS, Sentinels};
use crate::server::{Credentials, Password, Server, ServerUrl, SetupError, Task, TlsOptions};
use crate::x509::Fingerprint;

/// The Sentinels that know where a primary is.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sentinel")]
pub struct SentinelArgs {
    /// Sentinels that know where the primary is, separated by commas. They are asked one after another, each for 2 s at
    /// most, until one answers. rediss://HOST:PORT uses TLS.
    #[arg(long = "sentinel", value_name = "HOST:PORT,…", value_delimiter = ',', value_parser = SentinelParser, requires = "sentinel_name")]
    pub sentinels: Vec<ServerUrl>,

    /// The name of the primary at the Sentinels (`sentinel monitor NAME …`).
    #[arg(long, value_name = "NAME", requires = "sentinels")]
    pub sentinel_name: Option<String>,

    /// ACL user to log in as at the Sentinels. Without it, the password belongs to the user `default`.
    #[arg(long, value_name = "NAME", requires = "sentinel_password_file")]
    pub sentinel_user: Option<String>,

    /// File whose first line is the password for the Sentinels; others than owner and group must not be able to read
    /// it. The servers' password is never sent to a Sentinel.
    #[arg(long, value_name = "FILE", requires = "sentinels")]
    pub sentinel_password_file: Option<PathBuf>,

    /// Certificates (PEM) of the authorities to trust for rediss:// Sentinels, instead of the system's.
    #[arg(long, value_name = "FILE", requires = "sentinels")]
    pub sentinel_tls_ca: Option<PathBuf>,

    /// Client certificate chain (PEM), for Sentinels with `tls-auth-clients yes`.
    #[arg(long, value_name = "FILE", requires = "sentinel_tls_key")]
    pub sentinel_tls_cert: Option<PathBuf>,

    /// Private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "sentinel_tls_cert")]
    pub sentinel_tls_key: Option<PathBuf>,

    /// The name to expect in the Sentinels' certificates, if not the hosts of their addresses.
    #[arg(long, value_name = "NAME", requires = "sentinels")]
    pub sentinel_tls_server_name: Option<String>,

    /// The fingerprint of a Sentinel's certificate, instead of a name and an authority. May be repeated: one for each
    /// certificate.
    #[arg(
        long = "sentinel-tls-pin",
        value_name = "sha256:HEX",
        requires = "sentinels",
        conflicts_with = "sentinel_tls_server_name"
    )]
    pub sentinel_tls_pins: Vec<Fingerprint>,
}

impl SentinelArgs {
    /// Whether Sentinels are named.
    pub fn is_given(&self) -> bool {
        !self.sentinels.is_empty()
    }

    /// Reads the named files and prepares connections; `None` if no Sentinel is named. It sends nothing.
    ///
    /// # Errors
    /// A file cannot be used, or the options contradict each other.
    pub(crate) fn open(&self) -> Result<Option<Sentinels>, Failure> {
        let Some(name) = self.sentinel_name.clone().filter(|_| self.is_given()) else { return Ok(None) };
        if self.sentinels.len() > MOST_SENTINELS {
            return Err(Failure::refused(format!(
                "--sentinel names {} Sentinels: give {MOST_SENTINELS} at most",
                self.sentinels.len()
            )));
        }
        let password = self.sentinel_password_file.as_deref().map(Password::read_file).transpose()?;
        let credentials = Credentials { user: self.sentinel_user.clone().map(String::into_bytes), password };
        let tls = TlsOptions {
            ca: self.sentinel_tls_ca.clone(),
            certificate: self.sentinel_tls_cert.clone(),
            key: self.sentinel_tls_key.clone(),
            server_name: self.sentinel_tls_server_name.clone(),
            pins: self.sentinel_tls_pins.clone(),
            prefix: "sentinel-",
        };
        let server = |url: &ServerUrl| Server::new(url.clone(), credentials.clone(), &tls, Task::Sentinel);
        let servers = self.sentinels.iter().map(server).collect::<Result<_, SetupError>>()?;
        Ok(Some(Sentinels::new(servers, name)))
    }
}

/// Parses `HOST:PORT` or `rediss://HOST:PORT`. clap's own message would repeat the argument, which may contain a
/// password.
#[derive(Clone, Copy, Debug)]
struct SentinelParser;

impl TypedValueParser for SentinelParser {
    type Value = ServerUrl;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<ServerUrl, Error> {
        parse_sentinel(&value.to_string_lossy()).map_err(|cause| {
            let argument = argument.map(|argument| format!(" for '{argument}'")).unwrap_or_default();
            Error::raw(ErrorKind::ValueValidation, format!("invalid address{argument}: {cause}\n")).with_cmd(command)
        })
    }
}

fn parse_sentinel(text: &str) -> Result<ServerUrl, String> {
    if !text.contains("://") {
        let HostPort { host, port } = text.parse()?;
        return Ok(ServerUrl::tcp(host, port));
    }
    let url: ServerUrl = text.parse().map_err(|error: crate::server::UrlError| error.to_string())?;
    match url.host_and_port() {
        Some(_) if url.database() == 0 => Ok(url),
        _ => Err("a Sentinel is at HOST:PORT, or at rediss://HOST:PORT with TLS".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_sentinel_is_a_host_with_a_port_or_an_address_with_tls() {
        let table = [
            ("10.0.0.1:26379", "redis://10.0.0.1:26379"),
            ("[fd00::1]:26379", "redis://[fd00::1]:26379"),
            ("rediss://s1:26380", "rediss://s1:26380"),
        ];
        for (typed, shown) in table {
            assert_eq!(parse_sentinel(typed).unwrap().to_string(), shown);
        }
        for wrong in ["s1", "s1:0", "unix:///s", "redis://s1:1/2", "redis://user:secret@s1:1", "user:secret@s1:1"] {
            let why = parse_sentinel(wrong).unwrap_err();
            assert!(!why.contains("secret"), "{why}");
        }
    }
}
