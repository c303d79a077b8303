//! Preparation: the pages of the tables' memory, which the system provides when they are touched first. The port is
//! open meanwhile, and the first snapshot follows.
//!
//! A snapshot that touched its pages itself would hold up the primary at each of them. Much memory takes minutes, so a
//! thread touches it step by step, and the source says how far it is.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_fabric::memory::Error as MemoryError;
use rustix::process::{Resource, getrlimit};
use tokio::sync::mpsc;

use super::Incoming;
use super::tables::no_memory;
use remora_base::units::{Size, readable};
use remora_process::exit::Failure;

/// Bytes that are touched between two looks at whether the source still wants them: some ten milliseconds' worth.
const STEP: u64 = 64 << 20;

/// A preparation that lasts longer is worth a line in the log.
const WORTH_SAYING: Duration = Duration::from_secs(1);

/// How often that line is repeated.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The tables' memory while it is prepared. Dropping it ends that, at the next step.
#[derive(Debug)]
pub(super) struct Preparation {
    shared: Arc<Shared>,
    said: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    began: Instant,
    whole: u64,
    touched: AtomicU64,
    is_over: AtomicBool,
    is_stopped: AtomicBool,
}

impl Preparation {
    /// Begins to touch the first bytes of these memories. The end is told to the source's loop.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn begin(
        memories: Vec<(Arc<Memory>, u64)>,
        incoming: mpsc::Sender<Incoming>,
    ) -> Result<Preparation, Failure> {
        let preparation = Preparation::of(memories.iter().map(|(_, bytes)| bytes).sum());
        let shared = preparation.shared.clone();
        let thread = std::thread::Builder::new().name("preparation".into()).spawn(move || {
            let mut memories = memories.iter();
            let done = memories.try_for_each(|(memory, bytes)| shared.touch(*bytes, |range| memory.prefault(range)));
            shared.is_over.store(true, Relaxed);
            let _ = incoming.blocking_send(Incoming::Prepared(done.map_err(no_memory))); // the source may have ended
        });
        thread.map_err(|error| Failure::local(format!("cannot start a thread for the memory: {error}")))?;
        Ok(preparation)
    }

    /// Nothing is to be touched.
    pub(super) fn none() -> Preparation {
        let preparation = Preparation::of(0);
        preparation.shared.is_over.store(true, Relaxed);
        preparation
    }

    fn of(whole: u64) -> Preparation {
        let (touched, is_over, is_stopped) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
        Preparation {
            shared: Arc::new(Shared { began: Instant::now(), whole, touched, is_over, is_stopped }),
            said: None,
        }
    }

    /// Whether snapshots must wait for it.
    pub(super) fn is_under_way(&self) -> bool {
        !self.shared.is_over.load(Relaxed)
    }

    /// What the source does; empty once it is over.
    pub(super) fn words(&self) -> String {
        if !self.is_under_way() {
            return String::new();
        }
        words(self.shared.whole, self.shared.touched.load(Relaxed), self.shared.began.elapsed())
    }

    /// Logs how far it is, if it lasts. Called now and then.
    pub(super) fn say(&mut self, now: Instant) {
        let since = self.said.map_or(self.shared.began + WORTH_SAYING, |said| said + SAY_EVERY);
        if now >= since && self.is_under_way() {
            self.said = Some(now);
            tracing::info!("{}; replicas that join wait for it", self.words());
        }
    }

    /// Logs that it is over.
    pub(super) fn ended(&self) {
        let took = readable(self.shared.began.elapsed());
        let size = Size::bytes(self.shared.whole);
        match self.said {
            Some(_) => tracing::info!(%size, "the memory is prepared, after {took}"),
            None => tracing::debug!(%size, "the memory is prepared, after {took}"),
        }
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Relaxed);
    }
}

impl Shared {
    /// Touches this many bytes, by steps.
    fn touch(
        &self,
        bytes: u64,
        mut prefault: impl FnMut(Range<u64>) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let mut at = 0;
        while at < bytes && !self.is_stopped.load(Relaxed) {
            let end = (at + STEP).min(bytes);
            prefault(at..end)?;
            self.touched.fetch_add(end - at, Relaxed);
            at = end;
        }
        Ok(())
    }
}

/// `preparing 160 GiB of memory, about 60 s left`.
fn words(whole: u64, touched: u64, took: Duration) -> String {
    let what = format!("preparing {} of memory", Size::bytes(whole.div_ceil(1 << 20) << 20));
    let left = whole.saturating_sub(touched);
    let left = Duration::try_from_secs_f64(took.as_secs_f64() * left as f64 / touched as f64);
    // Not a number as long as nothing is touched.
    left.map_or(what.clone(), |left| format!("{what}, about {} left", readable(left)))
}

// Descriptors: whether this process may open as many as the replicas of `--max-replicas` need.
//
// A source that runs out of them in the middle of its work rejects replicas, and cannot even connect to its own
// server. So it refuses to start instead. The process has raised its soft limit to the hard one by then.

/// Descriptors of one replica: its control connection, a data lane for each of its two tables, and one for a lane that
/// replaces another before the source has found that one closed. With `--lanes` a replica may use more.
const PER_REPLICA: u64 = 4;

/// All others: 64 handshakes with two descriptors each, 16 connections that are turned away, listeners, the server's
/// connections, tables, and those of the runtime.
const OTHERS: u64 = 256;

/// Checks the limit of open descriptors.
///
/// # Errors
/// It is too low for this many replicas.
pub(super) fn check(max_replicas: u32) -> Result<(), Failure> {
    match getrlimit(Resource::Nofile).current {
        Some(limit) => check_limit(limit, max_replicas),
        None => Ok(()),
    }
}

fn check_limit(limit: u64, max_replicas: u32) -> Result<(), Failure> {
    let needed = u64::from(max_replicas) * PER_REPLICA + OTHERS;
    if needed <= limit {
        return Ok(());
    }
    let fits = limit.saturating_sub(OTHERS) / PER_REPLICA;
    Err(Failure::local(format!(
        "--max-replicas {max_replicas} needs {needed} open descriptors, and this process may open {limit} (RLIMIT_NOFILE); raise \
         the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or set --max-replicas to at most {}",
        fits.max(1)
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::Pages;

    use super::*;

    #[test]
    fn how_long_it_takes_is_known_from_what_has_been_touched() {
        let second = Duration::from_secs(1);
        assert_eq!(words(160 << 30, 0, second), "preparing 160 GiB of memory");
        assert_eq!(words(160 << 30, 40 << 30, 20 * second), "preparing 160 GiB of memory, about 60 s left");
        assert_eq!(words((1 << 30) - 1, 1 << 30, second), "preparing 1 GiB of memory, about 0.0 s left");
        assert!(words(u64::MAX >> 4, 1, second).ends_with(" left"));
        assert_eq!(words(1 << 30, 0, Duration::ZERO), "preparing 1 GiB of memory");
        assert!(words(u64::MAX >> 4, 1, Duration::MAX).ends_with("of memory"), "no overflow");
    }

    #[test]
    fn all_is_touched_by_steps_and_no_more_once_the_source_has_gone() {
        let preparation = Preparation::of(3 * STEP + 5);
        let mut touched = Vec::new();
        let all = preparation.shared.touch(3 * STEP + 5, |range| {
            touched.push(range);
            Ok(())
        });
        all.unwrap();
        assert_eq!(touched, [0..STEP, STEP..2 * STEP, 2 * STEP..3 * STEP, 3 * STEP..3 * STEP + 5]);
        assert!(preparation.is_under_way() && preparation.words().contains("about 0.0 s left"));
        let shared = preparation.shared.clone();
        drop(preparation);
        shared.touch(STEP, |_| panic!("it is stopped")).unwrap();
    }

    #[tokio::test]
    async fn the_loop_hears_of_the_end_and_of_memory_that_is_not_there() {
        let (incoming, mut inbox) = mpsc::channel(4);
        let memory = Arc::new(Memory::create("test", 1 << 20, Pages::Small).unwrap());
        for (bytes, is_there) in [(1 << 20, true), (2 << 20, false)] {
            let preparation = Preparation::begin(vec![(memory.clone(), bytes)], incoming.clone()).unwrap();
            let Some(Incoming::Prepared(done)) = inbox.recv().await else { panic!("another event") };
            assert_eq!(done.is_ok(), is_there);
            assert!(!preparation.is_under_way() && preparation.words().is_empty());
        }
        assert!(!Preparation::none().is_under_way());
    }

    #[test]
    fn a_limit_that_is_too_low_is_named_with_the_replicas_that_it_allows() {
        assert!(check_limit(1024, 64).is_ok(), "the defaults of most systems");
        assert!(check_limit(4352, 1024).is_ok());
        let refused = check_limit(4096, 1024).unwrap_err();
        assert_eq!(refused.code, remora_process::exit::Code::Local);
        for part in ["--max-replicas 1024", "4352", "may open 4096", "at most 960"] {
            assert!(refused.message.contains(part), "{}", refused.message);
        }
    }
}
