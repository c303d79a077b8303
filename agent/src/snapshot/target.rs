//! Target: where a snapshot goes as it arrives. One keeps each snapshot as a file that is mounted, another one keeps
//! the slots of a file that is put in its place at the end.

use std::io;
use std::path::Path;
use std::sync::Arc;

use remora_table::{Origin, Slot};

use crate::exit::Failure;
use crate::replica::spool::{Held, SnapshotId};

/// Where snapshots go, one after the other.
pub(super) trait Target: Send + Sync {
    /// The one that has come last.
    fn present(&self) -> Option<Arc<dyn Keeper>>;

    /// Another one comes: what has not arrived of the one before will not.
    ///
    /// # Errors
    /// There is no place for it.
    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>>;

    /// The folder into whose file system its bytes go.
    fn folder(&self) -> &Path;

    /// Why bytes cannot be kept, and what to do.
    fn failure(&self, error: &io::Error) -> Failure;
}

/// Where the slots of one snapshot go, in their order.
pub(super) trait Keeper: Send + Sync {
    /// Which snapshot it is.
    fn origin(&self) -> Origin;

    /// How far it is.
    fn reached(&self) -> Reached;

    /// Writes the bytes of the next slot, which count once they are [`Keeper::add`]ed.
    ///
    /// # Errors
    /// They cannot be written.
    fn keep(&self, slot: &Slot) -> io::Result<Held>;

    /// The slot was right: its memory had not been used for another one when it had been written.
    ///
    /// # Errors
    /// It cannot be recorded.
    fn add(&self, held: Held) -> io::Result<()>;

    /// Everything has arrived.
    ///
    /// # Errors
    /// It cannot be made safe, or is not what it should be.
    fn complete(&self) -> io::Result<()>;

    /// What has not arrived will not come.
    fn lose(&self);
}

/// Whether more will come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Arriving,
    Whole,
    /// The source has withdrawn it before all had arrived.
    Lost,
}

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reached {
    pub(super) bytes: u64,
    pub(super) slots: u64,
    pub(super) stage: Stage,
}
