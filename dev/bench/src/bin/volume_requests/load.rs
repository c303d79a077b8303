//! Load: writes that are submitted as fast as the volume takes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_volume::client::{Error, Request, Volume};
use remora_volume::shape::BLOCK_BYTES;

/// Bytes a second of writes of `blocks` blocks that are completed in `span`. The volume makes the caller wait while it
/// has as many as it takes.
pub(crate) fn rate(volume: &Volume, blocks: u32, span: Duration) -> Result<f64, Error> {
    let (completed, data) = (Arc::new(AtomicU64::new(0)), Bytes::from(vec![5; blocks as usize * BLOCK_BYTES]));
    let places = volume.shape().blocks() / u64::from(blocks);
    let (began, mut number) = (Instant::now(), 0);
    while began.elapsed() < span {
        let counter = Arc::clone(&completed);
        let done = move |result: Result<Bytes, Error>| _ = counter.fetch_add(result.is_ok().into(), Ordering::Relaxed);
        volume.submit(Request::write(number % places * u64::from(blocks), data.clone()), done)?;
        number += 1;
    }
    let (writes, seconds) = (completed.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
    volume.flush()?; // the next measurement begins with an idle volume
    Ok((writes * data.len() as u64) as f64 / seconds)
}

/// Writes each block once, so that no measurement pays for memory that is touched for the first time.
pub(crate) fn fill(volume: &Volume) -> Result<(), Error> {
    let (blocks, most) = (volume.shape().blocks(), MIB_BLOCKS.into());
    for first in (0..blocks).step_by(MIB_BLOCKS as usize) {
        let count = (blocks - first).min(most);
        volume.write(first, vec![7; count as usize * BLOCK_BYTES])?;
    }
    volume.flush()
}

/// Blocks of 1 MiB.
pub(crate) const MIB_BLOCKS: u32 = 256;
