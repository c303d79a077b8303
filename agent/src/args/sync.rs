//! The arguments of one sync, however its server comes to it.

use std::path::PathBuf;
use std::time::Duration;

use super::{LendArgs, PeerArgs, ReadArgs, RelayArgs};
use crate::conversation::SourceKey;
use crate::units::Size;

/// What the command line says about a sync: that of `remora replica`, or of `remora attend`.
#[derive(Clone, Debug)]
pub(crate) struct SyncArgs {
    pub(crate) read: ReadArgs,
    /// The key that the source must hold.
    pub(crate) source_key: Option<SourceKey>,
    /// The name in the source's status.
    pub(crate) name: Option<String>,
    pub(crate) memory: Size,
    pub(crate) relay: RelayArgs,
    /// How long slots are lent when the server has been handed over.
    pub(crate) linger: Duration,
    /// The file for the summary.
    pub(crate) json: Option<PathBuf>,
    /// Whether the conditions of an exact replica are printed.
    pub(crate) explain: bool,
    pub(crate) told: ToldArgs,
}

impl SyncArgs {
    /// The sync of a server whose own connection to its primary is intercepted, without a summary.
    pub(super) fn intercepted(read: &ReadArgs, peers: &PeerArgs, memory: Size, lend: &LendArgs) -> SyncArgs {
        SyncArgs {
            read: read.clone(),
            source_key: peers.expected.source_key,
            name: peers.name.clone(),
            memory,
            relay: lend.relay.clone(),
            linger: lend.linger,
            json: None,
            explain: false,
            told: ToldArgs::default(),
        }
    }
}

/// What is said about a server that is told to follow the agent's link. The default is for one whose own connection to
/// its primary is intercepted.
#[derive(Clone, Debug)]
pub(crate) struct ToldArgs {
    pub(crate) stay: bool,
    /// Whether the data that the server holds may be replaced.
    pub(crate) replaces: bool,
    pub(crate) state_dir: Option<PathBuf>,
}

impl Default for ToldArgs {
    fn default() -> ToldArgs {
        // The server has asked its primary for a full copy: it replaces its data whatever the agent does.
        ToldArgs { stay: false, replaces: true, state_dir: None }
    }
}
