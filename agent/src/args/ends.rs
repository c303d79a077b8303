//! The options that name the two ends of a move: the server that clients leave, and the one that they come to.

use std::path::PathBuf;

use clap::Args;

use super::server::{TlsArgs, UrlParser};
use crate::server::{Server, ServerUrl, SetupError, Task};

/// `--from`, `--to`, and the login of each.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Servers")]
pub struct EndsArgs {
    /// The old primary: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub from: ServerUrl,

    /// ACL user on the old primary.
    #[arg(long, value_name = "NAME")]
    pub from_user: Option<String>,

    /// File whose first line is the password on the old primary. Without it, the environment variable REMORA_PASSWORD
    /// is used.
    #[arg(long, value_name = "FILE")]
    pub from_password_file: Option<PathBuf>,

    /// The server that is to take its place.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub to: ServerUrl,

    /// ACL user on that server.
    #[arg(long, value_name = "NAME")]
    pub to_user: Option<String>,

    /// File whose first line is the password on that server. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE")]
    pub to_password_file: Option<PathBuf>,

    /// The TLS options are for each of the two that has a rediss:// address.
    #[command(flatten)]
    pub tls: TlsArgs,
}

impl EndsArgs {
    /// The old primary.
    pub fn open_from(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.from, self.from_user.as_deref(), self.from_password_file.as_deref(), task)
    }

    /// The server that is to take its place.
    pub fn open_to(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.to, self.to_user.as_deref(), self.to_password_file.as_deref(), task)
    }
}
