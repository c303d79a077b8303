//! Stall: the longest time between two answers while a server is killed, or hangs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remora_bench::copies::{CopyServer, Place, new_volume};
use remora_bench::{Run, Sample};
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Volume};
use remora_volume::shape::BLOCK_BYTES;
use rustix::process::Signal;

use crate::load::fill;
use crate::{Failure, PROMISED, Scene, sample};

/// Three servers, of which two hold a write before it is answered.
pub(crate) struct Stalls {
    servers: Vec<CopyServer>,
    volume: Volume,
    /// How long a fault lasts, and a time without one.
    span: Duration,
}

impl Stalls {
    pub(crate) fn new(span: Duration) -> Result<Stalls, Failure> {
        let start = |_| CopyServer::start("tcp:127.0.0.1:0", Place::default());
        let servers: Vec<CopyServer> = (0..3).map(start).collect::<Result<_, _>>()?;
        let addresses: Vec<Address> = servers.iter().map(|server| server.address.clone()).collect();
        let volume = Volume::open(new_volume(&addresses, 2, BLOCKS)?, &addresses, &ClientOptions::default())?;
        fill(&volume)?;
        Ok(Stalls { servers, volume, span })
    }

    /// The longest time between two answers, of writes one after the other, from before `fault` until it has ended and
    /// `span` is over.
    fn longest(
        volume: &Volume,
        span: Duration,
        fault: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Duration, Failure> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (mut longest, mut last, mut number) = (Duration::ZERO, Instant::now(), 0);
                while !is_over.load(Ordering::Relaxed) {
                    number = (number + 7919) % BLOCKS;
                    volume.write(number, vec![3; BLOCK_BYTES])?;
                    longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
                Ok::<Duration, Error>(longest)
            });
            std::thread::sleep(BEFORE);
            let done = fault();
            std::thread::sleep(span);
            is_over.store(true, Ordering::Relaxed);
            let longest = writer.join().map_err(|_| "the writer has panicked")??;
            done.map(|()| longest)
        })
    }

    /// Until every copy is whole again.
    fn wait_until_whole(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + WHOLE_LIMIT;
        while self.volume.members().len() < self.servers.len() {
            if Instant::now() > deadline {
                return Err(format!("copies are not whole again: {:?}", self.volume.members()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Scene for Stalls {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let number = round % self.servers.len();
        self.wait_until_whole()?;
        let quiet = Stalls::longest(&self.volume, self.span, || Ok(()))?;

        let victim = &mut self.servers[number];
        let killed = Stalls::longest(&self.volume, self.span, || {
            victim.process.kill()?;
            Ok(())
        })?;
        *victim = CopyServer::start(&victim.address.to_string(), Place::default())?;
        self.wait_until_whole()?;

        let victim = &mut self.servers[number];
        let limit = ClientOptions::default().copy_limit;
        let hangs = Stalls::longest(&self.volume, limit + self.span, || Ok(victim.process.signal(Signal::STOP)?))?;
        victim.process.signal(Signal::CONT)?;
        self.wait_until_whole()?;

        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let limits = [(KILLED, KILLED_LIMIT), (HANGS, limit + HANGS_MORE)];
        let mut samples: Vec<Sample> = limits.map(|(case, limit)| sample(PROMISED, case, round, ms(limit))).into();
        for (case, longest) in [(QUIET, quiet), (KILLED, killed), (HANGS, hangs)] {
            samples.push(sample(OURS, case, round, ms(longest)));
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        for case in [KILLED, HANGS] {
            run.compare_less((OURS, case), (PROMISED, case), Some(1.0));
        }
    }
}

const OURS: &str = "three copies, two hold a write";

const QUIET: &str = "longest time between two answers, ms";
const KILLED: &str = "the same while a server is killed, ms";
const HANGS: &str = "the same while a server hangs, ms";

const KILLED_LIMIT: Duration = Duration::from_millis(100);

/// Beyond the time after which a server is left out.
const HANGS_MORE: Duration = Duration::from_millis(500);

/// 64 MiB.
const BLOCKS: u64 = 16 * 1024;

/// Of undisturbed writes before a fault.
const BEFORE: Duration = Duration::from_millis(300);

/// A copy of 64 MiB is taken back in less than a second. A server that was away for long is tried again every 5 s.
const WHOLE_LIMIT: Duration = Duration::from_secs(30);
