//! The options of a command that asks one source.

use std::path::PathBuf;

use clap::Args;

use super::{HostPort, SecurityArgs, SourceKeyArgs};
use crate::conversation::tokens::Credentials;
use crate::exit::Failure;

/// Which source a command asks, and how it proves itself.
#[derive(Clone, Debug, Args)]
pub struct AskArgs {
    /// Host and port of the source agent.
    #[arg(long, value_name = "HOST:PORT")]
    pub source: HostPort,

    /// File with the secret that this command shares with the source. Needed unless the source has `--security mtls`
    /// and no token.
    #[arg(long, value_name = "FILE", required_unless_present = "cert")]
    pub token_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,
}

impl AskArgs {
    /// What proves this command to the source.
    ///
    /// # Errors
    /// As [`SecurityArgs::credentials`].
    pub(crate) fn credentials(&self) -> Result<Credentials, Failure> {
        self.security.credentials(self.token_file.as_ref(), &self.expected)
    }
}
