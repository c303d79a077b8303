//! The options of an agent that makes replicas: its peers are the source, and other replicas.

use clap::Args;
use remora_wire::is_printable;

use super::{ReplicaNameArgs, SecurityArgs, SentinelArgs, SourceKeyArgs};

/// How the agent proves itself to its peers, which of them it believes, and its name among them.
#[derive(Clone, Debug, Args)]
pub struct PeerArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub readers: ReplicaNameArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

    /// Name to appear under in `remora status` and the source's log. Default: the server's address.
    #[arg(long, value_name = "NAME", value_parser = parse_name, help_heading = "Source")]
    pub name: Option<String>,
}

pub(super) fn parse_name(text: &str) -> Result<String, String> {
    match text.chars().find(|character| !is_printable(*character)) {
        Some(character) => Err(format!("a name has printable characters only, and not {character:?}")),
        None => Ok(text.to_owned()),
    }
}
