//! What a primary's clients feel: GETs and SETs at a given rate, each timed, and the times cut to a window afterwards.
//!
//! ```text
//!   due ──┬──────┬──────┬──────┬──▶        the rate is kept whatever the server does: a command that could not be sent when it
//!         │ 80 µs│ 80 µs│ 30 ms ......       was due, as the one before was still out, is counted from when it was due
//! ```
//!
//! So a server that stalls for 30 ms is felt by everybody who wanted something in these 30 ms, as it is in life; a generator
//! that waits for each answer before it thinks of the next command would count one slow command. The generator's own late
//! waking is not counted: it says nothing of the server.
//!
//! Its threads go before everybody else's on their processor: who plays a client on a machine that plays all hosts must not wait for a turn that
//! the client's own machine would have given it.
//!
//! A tool of its own as the common ones either wait (redis-benchmark) or are in no distribution, and neither cuts to a window.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_lab::{Address, Client, Host, Random, Server};
use serde::{Deserialize, Serialize};

use crate::quantile;
use crate::sync::Result;

/// A load that is on.
pub struct Load {
    begun: Instant,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Vec<Beat>>>>,
}

/// One command.
#[derive(Clone, Copy, Debug)]
struct Beat {
    /// When it was due, in µs since the load began.
    due: u64,
    /// Until its answer, in µs.
    took: u32,
}

/// What was felt in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Felt {
    /// Commands answered per second.
    pub per_second: f64,
    /// Milliseconds within which half of them were.
    pub p50: f64,
    /// ... 99 of a hundred.
    pub p99: f64,
    /// ... 999 of a thousand.
    pub p999: f64,
    /// ... all.
    pub most: f64,
}

impl Load {
    /// Writes the keys that it will ask for.
    ///
    /// # Errors
    /// The server refuses.
    pub fn prepare(server: &Server) -> Result<()> {
        let value = vec![b'x'; VALUE_BYTES];
        let commands: Vec<Vec<Vec<u8>>> =
            (0..KEYS).map(|number| vec![b"SET".to_vec(), key(number), value.clone()]).collect();
        server.client()?.pipeline(&commands)?;
        Ok(())
    }

    /// Begins: so many commands per second by [`CONNECTIONS`] connections from that host, or from the server's own.
    ///
    /// # Errors
    /// A connection could not be made.
    pub fn start(server: &Server, from: Option<&Host>, per_second: u64) -> Result<Load> {
        let from = from.or(server.host());
        let address = Address::Tcp(server.address());
        // Dropped where a connection fails, which ends those that have begun.
        let mut load = Load { begun: Instant::now(), is_over: Arc::new(AtomicBool::new(false)), threads: Vec::new() };
        for number in 0..CONNECTIONS {
            let client = match from {
                Some(host) => host.within(|| Client::connect(&address))??,
                None => Client::connect(&address)?,
            };
            let every = Duration::from_secs_f64(CONNECTIONS as f64 / per_second.max(1) as f64);
            let first = every.mul_f64(number as f64 / CONNECTIONS as f64);
            let clock = Clock { begun: load.begun, first, every };
            let is_over = Arc::clone(&load.is_over);
            let host = from.cloned();
            load.threads.push(thread::spawn(move || {
                host.map_or(Ok(()), |host| host.keep_to_processors())?;
                beat(client, clock, number, &is_over)
            }));
        }
        Ok(load)
    }

    /// Ends it; what was felt between these moments.
    ///
    /// # Errors
    /// A connection failed, or nothing was answered in the window.
    pub fn end(mut self, (from, to): (Instant, Instant)) -> Result<Felt> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut beats = Vec::new();
        for thread in self.threads.drain(..) {
            beats.extend(thread.join().map_err(|_| "a client's thread panicked")??);
        }
        let micros = |moment: Instant| u64::try_from(moment.saturating_duration_since(self.begun).as_micros());
        let (from, to) = (micros(from)?, micros(to)?);
        felt(beats.into_iter().filter(|beat| (from..to).contains(&beat.due)), to.saturating_sub(from))
            .ok_or_else(|| "no command was due in the time of the sync".into())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // What it would say nobody asks any more.
            let _ = thread.join();
        }
    }
}

/// When a connection's commands are due.
#[derive(Clone, Copy)]
struct Clock {
    begun: Instant,
    first: Duration,
    every: Duration,
}

fn beat(mut client: Client, clock: Clock, number: u64, is_over: &AtomicBool) -> Result<Vec<Beat>> {
    // This thread alone. Who may not (it takes root, as test networks do) measures with what the system gives.
    let _ = rustix::process::setpriority_process(None, BEFORE_ALL);
    let mut random = Random::new(number);
    let value = vec![b'y'; VALUE_BYTES];
    let mut beats = Vec::new();
    let mut due = clock.first;
    while !is_over.load(Ordering::Relaxed) {
        let key = key(random.below(KEYS));
        let is_set = random.one_in(ONE_SET_IN);
        // From when it was due if the connection was still waiting then, else from when we woke up for it.
        let since = match due.checked_sub(clock.begun.elapsed()) {
            Some(early) => {
                thread::sleep(early);
                clock.begun.elapsed()
            }
            None => due,
        };
        if is_set {
            client.ok(&[b"SET".as_slice(), &key, &value])?;
        } else {
            client.bytes(&[b"GET".as_slice(), &key])?;
        }
        let took = clock.begun.elapsed().saturating_sub(since);
        beats.push(Beat { due: u64::try_from(due.as_micros())?, took: u32::try_from(took.as_micros())? });
        due += clock.every;
    }
    Ok(beats)
}

fn felt(beats: impl Iterator<Item = Beat>, micros: u64) -> Option<Felt> {
    let mut times: Vec<f64> = beats.map(|beat| f64::from(beat.took) / 1e3).collect();
    times.sort_by(f64::total_cmp);
    Some(Felt {
        per_second: times.len() as f64 / (micros as f64 / 1e6),
        p50: quantile(&times, 0.5)?,
        p99: quantile(&times, 0.99)?,
        p999: quantile(&times, 0.999)?,
        most: quantile(&times, 1.0)?,
    })
}

fn key(number: u64) -> Vec<u8> {
    format!("felt:{number}").into_bytes()
}

/// Connections of one load: enough that one slow answer does not hold up all, few enough for two processors.
pub const CONNECTIONS: u64 = 8;

/// The highest of nice(2)'s priorities.
const BEFORE_ALL: i32 = -20;

/// Keys that it asks for, and the bytes of each: 10 MB beside the data set.
const KEYS: u64 = 10_000;
const VALUE_BYTES: usize = 1 << 10;

/// One command in ten writes.
const ONE_SET_IN: u64 = 10;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use remora_lab::require;

    use super::*;

    #[test]
    fn a_server_that_stands_still_is_felt_by_all_who_wanted_something_meanwhile() {
        let Some(kind) = require::redis() else { return };
        let mut server = Server::start(kind).unwrap();
        Load::prepare(&server).unwrap();
        let load = Load::start(&server, None, 1000).unwrap();
        let begun = Instant::now();
        thread::sleep(Duration::from_millis(300));
        server.pause().unwrap();
        thread::sleep(Duration::from_millis(300));
        server.resume().unwrap();
        thread::sleep(Duration::from_millis(400));
        let felt = load.end((begun, begun + Duration::from_secs(1))).unwrap();
        // 300 of 1000 were due while it stood still: each waited for what was left of the 300 ms.
        assert!(felt.p99 > 150.0 && felt.most > 280.0, "{felt:?}");
        assert!(felt.per_second > 800.0, "{felt:?}");
    }

    #[test]
    fn only_what_was_due_in_the_window_counts() {
        let beats = [(5, 1000), (10, 2000), (19, 4000), (20, 9000)].map(|(due, took)| Beat { due, took });
        let inside = beats.into_iter().filter(|beat| (10..20).contains(&beat.due));
        let felt = felt(inside, 10).unwrap();
        assert_eq!((felt.most, felt.p50), (4.0, 3.0));
        assert!((felt.per_second - 200_000.0).abs() < 1e-6);
    }
}
