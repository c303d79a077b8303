//! Out: a snapshot to standard output, as it arrives.
//!
//! The bytes are kept in a file without a name first, so that a reader at the other end of the pipe that takes its time
//! holds up neither the source nor its other replicas.

use std::io::{self, Write};
use std::sync::{Arc, mpsc};

use super::kept::{Found, Kept};

/// Bytes that are written at a time.
const PIECE: u64 = 1 << 20;

/// Writes a snapshot to its end. Blocks: for a thread that the end of the process does not wait for.
///
/// # Errors
/// The other end has gone, or the snapshot will not become whole.
pub(super) fn write_out(kept: &Arc<Kept>, out: &mut impl Write) -> io::Result<u64> {
    let mut at = 0;
    loop {
        let (tell, found) = mpsc::sync_channel(1);
        kept.when_there(at, at, Box::new(move |there| _ = tell.send(there))); // this thread waits for it
        match found.recv().map_err(io::Error::other)? {
            Found::Bytes(there) => {
                let bytes = kept.read(at, there.min(PIECE) as usize)?;
                out.write_all(&bytes)?;
                at += bytes.len() as u64;
            }
            Found::End => {
                out.flush()?;
                return Ok(at);
            }
            Found::Lost | Found::Interrupted => {
                return Err(io::Error::other(format!("after {at} bytes no more of the snapshot came")));
            }
        }
    }
}
