//! Stream: bytes of the primary's replication stream that have arrived and that the server has not been given.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use remora_redis::aof::{Foreign, Known, Unfit};
use remora_table::Chunk;

/// Bytes of the replication stream that wait for the server. Chunks follow one another without a gap.
pub(super) struct Stream {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    /// Bytes that may wait. What the last turn has read comes on top: at most what the journal's buffers hold.
    limit: usize,
    /// Looks for what the server does not know.
    foreign: Option<Foreign>,
    /// What ends the stream.
    unfit: Option<Unfit>,
}

/// The result of a write.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrote {
    pub(super) bytes: usize,
    /// Offset of the last of them.
    pub(super) last: u64,
}

impl Stream {
    /// `known`: what the server knows, if anything else must not reach it.
    pub(super) fn new(limit: usize, known: Option<Arc<Known>>) -> Stream {
        let foreign = known.map(|known| Foreign::new(0, known));
        Stream { chunks: VecDeque::new(), bytes: 0, limit, foreign, unfit: None }
    }

    /// What the server does not know, once all before it has been written.
    pub(super) fn unfit(&self) -> Option<&Unfit> {
        self.unfit.as_ref().filter(|_| self.chunks.is_empty())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether reading must pause.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= self.limit || self.unfit.is_some()
    }

    /// Offset of the first byte that waits.
    pub(super) fn first(&self) -> Option<u64> {
        self.chunks.front().map(|chunk| chunk.offset)
    }

    pub(super) fn push(&mut self, mut chunk: Chunk) {
        if self.unfit.is_some() {
            return;
        }
        if let Some(foreign) = &mut self.foreign {
            if foreign.position() != chunk.offset {
                foreign.go_to(chunk.offset);
            }
            self.unfit = foreign.feed(&chunk.bytes).err();
            if let Some(unfit) = &self.unfit {
                chunk.bytes.truncate(unfit.border().saturating_sub(chunk.offset) as usize);
            }
            if chunk.bytes.is_empty() {
                return;
            }
        }
        self.bytes += chunk.bytes.len();
        self.chunks.push_back(chunk);
    }

    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        (self.bytes, self.unfit) = (0, None);
    }

    /// Hands the first chunk to `write`, which returns how much the socket took. `None` if nothing waits, or if there
    /// is no room.
    pub(super) fn write(
        &mut self,
        write: impl FnOnce(&[u8]) -> io::Result<Option<usize>>,
    ) -> io::Result<Option<Wrote>> {
        let Some(chunk) = self.chunks.front_mut() else { return Ok(None) };
        let Some(bytes) = write(&chunk.bytes)? else { return Ok(None) };
        self.bytes -= bytes;
        let last = (chunk.offset + bytes as u64).saturating_sub(1);
        if bytes == chunk.bytes.len() {
            self.chunks.pop_front();
        } else {
            chunk.bytes.drain(..bytes);
            chunk.offset += bytes as u64;
        }
        Ok(Some(Wrote { bytes, last }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn stream() -> Stream {
        let mut stream = Stream::new(8, None);
        stream.push(Chunk { offset: 101, bytes: b"hello".to_vec() });
        stream.push(Chunk { offset: 106, bytes: b"world".to_vec() });
        stream
    }

    #[test]
    fn a_write_of_a_part_leaves_the_rest_at_its_offset() {
        let (mut stream, mut out) = (stream(), Vec::new());
        let mut take = |stream: &mut Stream, most: usize| {
            stream.write(|bytes| {
                let n = bytes.len().min(most);
                out.extend_from_slice(&bytes[..n]);
                Ok(Some(n))
            })
        };
        assert_eq!(take(&mut stream, 2).unwrap(), Some(Wrote { bytes: 2, last: 102 }));
        assert_eq!(stream.first(), Some(103));
        assert_eq!(take(&mut stream, 99).unwrap(), Some(Wrote { bytes: 3, last: 105 }));
        assert_eq!(take(&mut stream, 99).unwrap(), Some(Wrote { bytes: 5, last: 110 }));
        assert_eq!(take(&mut stream, 99).unwrap(), None);
        assert!(stream.is_empty());
        assert_eq!(out, b"helloworld");
    }

    #[test]
    fn without_room_nothing_is_lost() {
        let mut stream = stream();
        assert_eq!(stream.write(|_| Ok(None)).unwrap(), None);
        assert!(stream.write(|_| Err(io::ErrorKind::BrokenPipe.into())).is_err());
        assert_eq!(stream.first(), Some(101));
        assert!(stream.is_full());
    }

    #[test]
    fn what_was_written_makes_room_for_more() {
        let mut stream = stream();
        assert!(stream.is_full());
        stream.write(|bytes| Ok(Some(bytes.len()))).unwrap();
        assert!(!stream.is_full());
        stream.clear();
        assert!(stream.is_empty() && stream.first().is_none() && !stream.is_full());
    }
}
