//! The options that name a server and its login.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use clap::{
    Arg, Args, Command,
    builder::TypedValueParser,
    error::{Error, ErrorKind},
};

use remora_base::x509::Fingerprint;
use remora_server::{Credentials, Login, Server, ServerUrl, SetupError, Task, TlsOptions, UrlError};

/// `--server` and its login.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH. Without a port: 6379.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub server: ServerUrl,

    /// ACL user to log in as. Without it, a password belongs to the user `default`.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// File whose first line is the password. Others than owner and group must not be able to read it. Without it, the
    /// environment variable REMORA_PASSWORD counts. Passwords are never taken from the command line.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsArgs,
}

/// How to connect to a `rediss://` server.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "TLS to the server")]
pub struct TlsArgs {
    /// Certificates (PEM) of the authorities to trust, instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// Client certificate chain (PEM), for servers with `tls-auth-clients yes`.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key (PEM) of the client certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// The name to expect in the server's certificate, if not the host of its address. Servers at other addresses, such
    /// as the primary, may have a certificate for this name or for their host. For connections to servers; those
    /// between agents have --source-name and --peer-name.
    #[arg(long, value_name = "NAME")]
    pub tls_server_name: Option<String>,

    /// The fingerprint of the server's certificate, as `openssl x509 -noout -fingerprint -sha256` prints it, instead of
    /// a name and an authority: for certificates that no name fits. May be repeated, also for the primary's
    /// certificate. For connections to servers; those between agents have --source-key.
    #[arg(long = "tls-pin", value_name = "sha256:HEX", conflicts_with = "tls_server_name")]
    pub tls_pins: Vec<Fingerprint>,
}

/// Parses an address from the command line. clap's own message would repeat the argument, which may contain a password.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UrlParser;

impl TypedValueParser for UrlParser {
    type Value = ServerUrl;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<ServerUrl, Error> {
        value.to_string_lossy().parse().map_err(|error: UrlError| {
            let argument = argument.map(|argument| format!(" for '{argument}'")).unwrap_or_default();
            Error::raw(ErrorKind::ValueValidation, format!("invalid address{argument}: {error}\n")).with_cmd(command)
        })
    }
}

impl ServerArgs {
    /// Reads the named files and prepares connections to the server. It sends nothing.
    pub fn open(&self, task: Task) -> Result<Server, SetupError> {
        self.login().open(task)
    }

    /// The options without their clap attributes.
    pub(crate) fn login(&self) -> Login {
        Login {
            url: self.server.clone(),
            user: self.user.clone(),
            password_file: self.password_file.clone(),
            tls: self.tls.options(),
        }
    }
}

impl TlsArgs {
    /// Prepares connections to one of several servers to which these options apply. One without TLS has no use for
    /// them, which is not an error.
    pub(crate) fn open(
        &self,
        url: &ServerUrl,
        user: Option<&str>,
        password_file: Option<&Path>,
        task: Task,
    ) -> Result<Server, SetupError> {
        let tls = if url.is_tls() { self.options() } else { TlsOptions::default() };
        Server::new(url.clone(), Credentials::gather(user, password_file)?, &tls, task)
    }

    /// The options as words of a command line, for a process that connects to the same server.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let files = [("--tls-ca", &self.tls_ca), ("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key)];
        let files = files.into_iter().filter_map(|(name, file)| Some((name, file.as_ref()?.clone().into_os_string())));
        let names = self.tls_server_name.iter().map(|name| ("--tls-server-name", name.into()));
        let pins = self.tls_pins.iter().map(|pin| ("--tls-pin", pin.to_string().into()));
        files.chain(names).chain(pins).flat_map(|(option, value)| [option.into(), value]).collect()
    }

    /// The TLS options without their clap attributes.
    pub fn options(&self) -> TlsOptions {
        TlsOptions {
            ca: self.tls_ca.clone(),
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            server_name: self.tls_server_name.clone(),
            pins: self.tls_pins.clone(),
            prefix: "",
        }
    }
}
