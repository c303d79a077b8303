//! What happens in a fork child before its first byte, if its server was armed.
//!
//! The child was forked to save something. It does that afterwards, as if nothing had been: for a sync that asked for almost nothing
//! that is a hundred bytes. So whatever goes wrong here is told on the board and costs the snapshot, nothing else.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use remora_fabric::{Claim, Memory};
use remora_table::Board;
use remora_table::board::{Stage, Work};

use super::armed::{self, Armed};
use super::commands::Walk;
use super::walk::{self, Trouble};
use crate::api::{Command, Context, EVENT_PERSISTENCE, EventHandler, OwnContext, OwnedStr, PERSISTENCE_RDB_START};

/// A snapshot begins.
pub(crate) struct SnapshotBegins;

impl EventHandler for SnapshotBegins {
    const EVENT: u64 = EVENT_PERSISTENCE;

    /// Of all beginnings only those in a fork child are ours; a save in the server itself is left alone.
    fn handle(context: &Context<'_>, what: u64) {
        if what != PERSISTENCE_RDB_START || !context.flags().is_child() || saves_to_disk() {
            return;
        }
        let Some(armed) = armed::take_in_child() else { return };
        if armed.board.stage() != Stage::Armed || armed.board.is_cancelled() {
            return;
        }
        WORK.set(Some(armed));
        let own = OwnContext::new(context);
        let error = match own.call(Walk::NAME, &[]) {
            None => Some("the server made no answer of it".to_owned()),
            Some(reply) => reply.error(),
        };
        // By now it has ended, one way or the other; unless it never began.
        if let (Some(armed), Some(error)) = (WORK.take(), error) {
            armed.board.fail(&format!("the walk could not be done: {error}"));
        }
    }
}

thread_local! {
    /// Nobody but this process writes the table.
    static CLAIM: RefCell<Option<Claim>> = const { RefCell::new(None) };
    /// On its way from the event to the command that the event calls.
    static WORK: RefCell<Option<Armed>> = const { RefCell::new(None) };
}

/// The work itself; the body of `REMORA.WALK`.
pub(super) fn work(context: &Context<'_>) {
    let Some(armed) = WORK.take() else { return };
    let (board, _stays) = (&armed.board, Unfinished(&armed.board));
    let done = match board.order().work {
        Work::Ease => ease(context, &armed),
        Work::Walk => walk_all(context, &armed),
    };
    match done {
        Ok(()) => board.finish(),
        Err(trouble) => board.fail(&trouble.to_string()),
    }
}

/// What a panic leaves behind: its agent is told, like of any other failure.
struct Unfinished<'b>(&'b Board);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("a mistake of ours in the walk; the server's log has its place");
        }
    }
}

/// The server saves as ever, but without compressing: a setting of this process alone, as it is a copy.
fn ease(context: &Context<'_>, armed: &Armed) -> Result<(), Trouble> {
    let origin = walk::origin(context)?;
    without_compression(context)?;
    Ok(armed.board.begin(&origin)?)
}

fn walk_all(context: &Context<'_>, armed: &Armed) -> Result<(), Trouble> {
    // What DUMP answers is compressed or not by the same setting. Where it can't be set, it is: as right, and slower.
    let _ = without_compression(context);
    let table = armed.table.as_ref().ok_or(Trouble::NoTable)?;
    let descriptor = table.try_clone().map_err(|error| Trouble::System(error.to_string()))?;
    let memory = Memory::adopt(descriptor, armed.board.order().geometry.memory_len())?;
    // Held until this process ends, whatever ends it: then the agent knows that nobody writes there any more.
    let claim = memory.claim()?.ok_or(Trouble::Claimed)?;
    CLAIM.set(Some(claim));
    walk::run(context, &armed.board, memory.into())
}

fn without_compression(context: &Context<'_>) -> Result<(), Trouble> {
    let words = ["SET", "rdbcompression", "no"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CONFIG", &arguments).ok_or(Trouble::NoAnswer("CONFIG SET"))?;
    reply.error().map_or(Ok(()), |text| Err(Trouble::Refused { command: "CONFIG SET", text }))
}

/// Whether this child was forked for a file (`BGSAVE`, a save point): servers name their children for what they do.
///
/// If its name does not say (`proc-title-template` may leave it out), the child walks, and whether that was for the right snapshot is found out
/// by its offset: the same offset of the same history is the same data.
fn saves_to_disk() -> bool {
    std::fs::read("/proc/self/cmdline").is_ok_and(|name| name.windows(BGSAVE.len()).any(|part| part == BGSAVE))
}

const BGSAVE: &[u8] = b"rdb-bgsave";

/// The server's own clock: milliseconds since 1970. It reads the system's at certain moments only, and judges keys by what it has read.
pub(super) fn server_clock(context: &Context<'_>) -> Result<u64, Trouble> {
    let info = context.server_info(c"server").ok_or(Trouble::NoAnswer("INFO server"))?;
    info.number(c"server_time_usec").map(|micros| micros / 1000).ok_or(Trouble::Untold("clock"))
}

/// Milliseconds since 1970.
pub(super) fn millis_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn this_process_saves_nothing() {
        assert!(!saves_to_disk());
    }
}
