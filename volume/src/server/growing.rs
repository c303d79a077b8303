//! Growing: the thread that copies a copy into a larger one, or back into a smaller one.
//!
//! Until the last block is copied the copy is as it was, and so it is if the server ends before: what is left in the
//! folder of the stores is removed at the next start. The promise that it gave, the writes that it holds and what it
//! claims to have held stay, so each rule holds between a copy that has grown and one that has not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::Connection;

use super::exports::Exports;
use super::kept::Stores;
use super::slot::Slot;
use super::{Budget, Grant, answer, refuse};
use crate::disk::files::Folder;
use crate::disk::recovery::Growth;
use crate::layout::Layout;
use crate::shape::Shape;
use crate::store::Store;
use crate::wire::{Cause, Reply};

/// What is asked of a copy that could have another size.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// To take it.
    Do,
    /// Only whether it could.
    Could,
}

/// A copy that is larger, and lacks blocks still.
pub(super) struct Larger {
    pub(super) store: Store,
    pub(super) grant: Grant,
    /// `None`: it is in memory only.
    pub(super) beside: Option<Beside>,
}

/// The store of the larger copy. When this is dropped, the folder beside the copy's is removed, whichever of the two
/// stores is in it then. No other growth may begin before.
pub(super) struct Beside {
    pub(super) stores: Arc<Stores>,
    pub(super) growth: Growth<Folder>,
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stores.end_growth(self.growth.shape().volume());
    }
}

impl Larger {
    /// Without a block.
    pub(super) fn new(shape: Shape, budget: &Arc<Budget>, stores: Option<&Arc<Stores>>) -> Result<Larger, String> {
        let bytes = Layout::of(shape).length();
        let grant = budget.take(bytes).ok_or_else(|| no_memory(bytes))?;
        let store = Store::create(shape).map_err(|error| error.to_string())?;
        let begin = |stores: &Arc<Stores>| {
            let growth = stores.begin_growth(shape)?;
            Ok::<_, String>(Beside { stores: Arc::clone(stores), growth })
        };
        Ok(Larger { store, grant, beside: stores.map(begin).transpose()? })
    }
}

/// Why a copy cannot have another size.
pub(super) fn no_memory(bytes: u64) -> String {
    format!("the server has no memory for {bytes} bytes beside the copy as it is: give it more, by --memory")
}

/// The thread.
pub(super) struct Growing {
    pub(super) slot: Arc<Slot>,
    pub(super) larger: Larger,
    /// Who is told.
    pub(super) connection: Connection,
    /// The copy goes back to the size with which this writer opens the volume on that connection.
    pub(super) opener: Option<u64>,
    pub(super) is_stopping: Arc<AtomicBool>,
}

impl Growing {
    /// `open`: opens the volume on the connection for the writer for which the copy goes back.
    pub(super) fn run(self, exports: &Exports, open: impl FnOnce(&Connection, &Arc<Slot>, u64)) {
        let Growing { slot, larger, connection, opener, is_stopping } = self;
        let (mut first, mut told) = (0, Instant::now());
        loop {
            // A command that was killed wants nothing any more.
            if is_stopping.load(Ordering::Acquire) || !connection.is_ready() {
                drop(larger);
                return slot.lock().end_growth();
            }
            let Some((batch, next)) = slot.lock().grow(&larger.store, first) else { break };
            let written = larger.beside.as_ref().map_or(Ok(()), |beside| beside.growth.write(&batch));
            if let Err(failure) = written {
                drop(larger);
                slot.lock().end_growth();
                return refuse(&connection, Cause::NoMemory, &failure.to_string());
            }
            first = next;
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                answer(&connection, &Reply::Progress { compared: first }, Bytes::new());
            }
        }
        let shape = larger.store.shape();
        let done = slot.lock().complete_growth(larger, exports);
        match done {
            Ok(is_there) => {
                tracing::info!(volume = %shape.volume(), blocks = shape.blocks(), "a copy has another size");
                match opener {
                    Some(writer) => open(&connection, &slot, writer),
                    None => answer(&connection, &Reply::Grown { is_there }, Bytes::new()),
                }
            }
            Err(failure) => refuse(&connection, Cause::NoMemory, &failure.to_string()),
        }
    }
}

/// How often the client is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(200);
