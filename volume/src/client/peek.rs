//! Peek: what a volume holds, looked at before its writer is replaced. It changes nothing, and that writer goes on.
//!
//! A server lends blocks to who names the writer that it obeys. So the copy is as that writer has it, and no promise is
//! asked for.

use std::time::Duration;

use bytes::Bytes;
use remora_messenger::Address;

use super::once::Asker;
use super::{ClientOptions, Error, Volume, count};
use crate::caller::Caller;
use crate::message::{Holder, State};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::version::Version;
use crate::wire::{Call, Mode, Reply, Run};

/// A copy that can be read, of a volume that another writer may have open.
pub struct Peek {
    caller: Caller,
    holder: Holder,
    blocks: u64,
}

impl Volume {
    /// Looks at the copy that is furthest. `None`: no writer has opened the volume, or no copy can be read, so that
    /// there is nothing to look at.
    ///
    /// # Errors
    /// As for [`Volume::standings`].
    pub fn peek(shape: Shape, servers: &[Address], options: &ClientOptions) -> Result<Option<Peek>, Error> {
        count(shape, servers)?;
        let mut asker = Asker::new(options)?;
        asker.limit = LIMIT;
        // As many as one of has every acknowledged write. Others may be on the host that has died.
        let answers = asker.ask_for(servers, &Call::Status { shape }, shape.copies().promises(), |_, _| true);
        let mut found: Vec<_> = servers
            .iter()
            .zip(answers)
            .filter_map(|(server, answer)| match answer {
                Ok(Reply::Status(status)) if status.standing.state == State::Whole => Some((server, status.standing)),
                _ => None,
            })
            .filter_map(|(server, standing)| Some((standing.applied, standing.promised?, server)))
            .collect();
        found.sort_by_key(|(applied, ..)| std::cmp::Reverse(*applied));
        let open = |(_, holder, server): (Version, Holder, &Address)| {
            let caller = Caller::connect(server, &options.security).ok()?;
            let peek = Peek { caller, holder, blocks: shape.blocks() };
            // As a borrower: the writer's own connection stays.
            let open = Call::Open { shape, mode: Mode::Borrow, writer: holder.writer };
            matches!(peek.ask(&open), Ok((Reply::Standing { .. }, _))).then_some(peek)
        };
        Ok(found.into_iter().find_map(open))
    }
}

impl Peek {
    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads blocks. What the writer changes meanwhile may be of before or of after.
    ///
    /// # Errors
    /// The server does not answer, or another writer has opened the volume.
    pub fn read(&self, run: Run) -> Result<Bytes, String> {
        let lend = Call::Lend { holder: self.holder, since: Version::NONE, run, with_blocks: true };
        match self.ask(&lend)? {
            (Reply::Lent { .. }, data) if data.len() == run.count as usize * BLOCK_BYTES => Ok(data),
            (Reply::Refused { text, .. }, _) => Err(text),
            (other, _) => Err(format!("an answer to another question: {other:?}")),
        }
    }

    fn ask(&self, call: &Call) -> Result<(Reply, Bytes), String> {
        let (reply, data) = self.caller.ask(call, LIMIT, || Ok::<_, String>(()))?;
        Ok((reply, Bytes::copy_from_slice(&data)))
    }
}

/// How long a server may take for an answer: a look must not delay a take-over for longer.
const LIMIT: Duration = Duration::from_secs(1);
