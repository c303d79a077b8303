//! A crowd: many control conversations with one source, from one process.
//!
//! ```text
//!   Crowd ── 16 callers, each with one messenger ──▶ N conversations ──▶ remora source
//!              handshake, Join, Progress every 50 or 500 ms, the source's messages read: as `remora replica` does
//! ```
//!
//! The conversations are the product's own: its handshake, its session and its messages. No server and no data lane is
//! behind them: a member reports slots that it has not read. Each says that it lends its slots and stands in one of
//! 20 zones, so that the source arranges all of them in one chain.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_agent::conversation::{Caller, Connection, Options, Token};
use remora_protocol::{Join, Message, Offer, Outcome, Phase, Progress, Relaying, Relays};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::sync::Result;

/// Conversations that are opened at the same time. A source admits 32 handshakes of one address.
const CALLERS: usize = 16;

/// Zones of the members, as if they stood in 20 racks.
const ZONES: usize = 20;

/// How often a replica that receives slots reports its progress.
const RECEIVING_EVERY: Duration = Duration::from_millis(50);

/// How often a replica that has nothing new to report does so.
const STAYING_EVERY: Duration = Duration::from_millis(500);

/// Time limit for all members to be offered the snapshot, and for all to leave.
const PATIENCE: Duration = Duration::from_secs(120);

/// Pause after the source had no place for a handshake.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

/// How often the crowd looks whether its members are where they should be.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Many conversations with one source. Dropping it closes them.
pub struct Crowd {
    runtime: Runtime,
    shared: Arc<Shared>,
    members: usize,
    joined: Duration,
}

/// What the members share.
#[derive(Default)]
struct Shared {
    offered: AtomicUsize,
    left: AtomicUsize,
    sent: AtomicU64,
    received: AtomicU64,
    stays: AtomicBool,
    leaves: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl Crowd {
    /// Opens this many conversations, and waits until the source has offered its snapshot in each.
    ///
    /// # Errors
    /// A conversation failed, or the source made a member wait for longer than two minutes.
    pub fn open(source: SocketAddr, token: &Path, members: usize) -> Result<Crowd> {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
        let token = Token::read_file(token)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let shared = Arc::new(Shared::default());
        let began = Instant::now();
        for caller in 0..CALLERS.min(members) {
            let numbers: Vec<usize> = (caller..members).step_by(CALLERS).collect();
            let caller = runtime.block_on(async { Caller::new(&token, &Options::default()) })?;
            let shared = shared.clone();
            runtime.spawn(async move {
                if let Err(error) = call_all(caller, source, numbers, &shared).await {
                    shared.fail(error.to_string());
                }
            });
        }
        let mut crowd = Crowd { runtime, shared, members, joined: Duration::ZERO };
        crowd.wait("every member to be offered the snapshot", |shared| shared.offered.load(Ordering::Relaxed))?;
        crowd.joined = began.elapsed();
        Ok(crowd)
    }

    /// Time from the first connect until the last member had its offer.
    pub fn joined(&self) -> Duration {
        self.joined
    }

    /// From now on, the members report that their servers follow the primary through the agents.
    pub fn stay(&self) {
        self.shared.stays.store(true, Ordering::Relaxed);
    }

    /// Messages that the members have sent and received so far.
    pub fn messages(&self) -> (u64, u64) {
        (self.shared.sent.load(Ordering::Relaxed), self.shared.received.load(Ordering::Relaxed))
    }

    /// Fails if a conversation has ended.
    ///
    /// # Errors
    /// Why it has ended.
    pub fn check(&self) -> Result<()> {
        let failure = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Lets every member leave, as replicas that were stopped, and waits until all conversations are closed.
    ///
    /// # Errors
    /// A conversation had failed, or did not close.
    pub fn leave(self) -> Result<()> {
        self.shared.leaves.store(true, Ordering::Relaxed);
        self.wait("every member to leave", |shared| shared.left.load(Ordering::Relaxed))?;
        self.runtime.shutdown_timeout(PATIENCE);
        Ok(())
    }

    fn wait(&self, what: &str, count: impl Fn(&Shared) -> usize) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while count(&self.shared) < self.members {
            self.check()?;
            if Instant::now() >= end {
                let reached = count(&self.shared);
                return Err(format!("waited {} s for {what}: {reached} of {}", PATIENCE.as_secs(), self.members).into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.check()
    }
}

impl Shared {
    fn fail(&self, text: String) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
    }
}

/// Opens these conversations, one after the other.
async fn call_all(mut caller: Caller, source: SocketAddr, numbers: Vec<usize>, shared: &Arc<Shared>) -> Result<()> {
    let began = Instant::now();
    for number in numbers {
        let connection = loop {
            match caller.call(source).await {
                Ok(connection) => break connection,
                // Replica agents try again too.
                Err(error) if error.fault.may_pass() && began.elapsed() < PATIENCE => sleep(AGAIN_AFTER).await,
                Err(error) => return Err(error.into()),
            }
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(error) = Member::default().run(number, connection, &shared).await {
                shared.fail(format!("member {number}: {error}"));
            }
            shared.left.fetch_add(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

/// One conversation, from its Join to its Leave.
#[derive(Default)]
struct Member {
    offer: Option<Offer>,
    reads_from: Option<u64>,
    slots: u64,
}

impl Member {
    async fn run(mut self, number: usize, connection: Connection, shared: &Shared) -> Result<()> {
        let (sender, mut receiver) = connection.split();
        sender.send(Message::Join(join(number))).await?;
        let mut every = RECEIVING_EVERY;
        let mut due = interval(every);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = receiver.receive() => {
                    shared.received.fetch_add(1, Ordering::Relaxed);
                    self.note(message?, shared)?;
                }
                _ = due.tick() => {
                    if shared.leaves.load(Ordering::Relaxed) {
                        break;
                    }
                    let stays = shared.stays.load(Ordering::Relaxed);
                    if stays && every == RECEIVING_EVERY {
                        every = STAYING_EVERY;
                        // Not all in the same moment.
                        due = tokio::time::interval_at(tokio::time::Instant::now() + spread(number), every);
                    }
                    if let Some(progress) = self.progress(stays) {
                        sender.send(Message::Progress(progress)).await?;
                        shared.sent.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        let leave = Message::Leave { outcome: Outcome::Stopped, text: "the benchmark is over".into() };
        sender.send(leave).await?;
        sender.finish(receiver).await;
        Ok(())
    }

    fn note(&mut self, message: Message, shared: &Shared) -> Result<()> {
        match message {
            Message::Offer(offer) => {
                self.reads_from = offer.upstream.as_ref().map(|upstream| upstream.session);
                if self.offer.replace(offer).is_none() {
                    shared.offered.fetch_add(1, Ordering::Relaxed);
                }
            }
            Message::ReadFrom { upstream, .. } => self.reads_from = upstream.map(|upstream| upstream.session),
            Message::Waiting { .. } | Message::Expected(_) => {}
            other => return Err(format!("the source sent {}", other.name()).into()),
        }
        Ok(())
    }

    /// The next report. A member that receives has one more slot in each.
    fn progress(&mut self, stays: bool) -> Option<Progress> {
        let offer = self.offer.as_ref()?;
        if !stays {
            self.slots += 1;
        }
        let relaying = Relaying { reads_from: self.reads_from, oldest: 0, held: self.slots, is_full: false };
        Some(Progress {
            generation: offer.generation,
            phase: if stays { Phase::Stay } else { Phase::Transfer },
            transport: None,
            transport_why: String::new(),
            no_fast_keys: String::new(),
            slots_below: self.slots,
            slots_held: self.slots,
            bytes: self.slots * u64::from(offer.snapshot.slot_size),
            applied_offset: if stays { offer.offset } else { 0 },
            relaying: Some(relaying),
        })
    }
}

/// A moment within [`STAYING_EVERY`], another one for each of a hundred members.
fn spread(number: usize) -> Duration {
    STAYING_EVERY / 100 * (number % 100) as u32
}

fn join(number: usize) -> Join {
    let zone = format!("rack{}", number % ZONES);
    // No member connects to another one. A real replica that reads over shared memory needs no upstream.
    let relays = Relays { serves_at: "127.0.0.1:9".into(), zone };
    let name = format!("member-{number}");
    Join { name, server: "Valkey 9.1.2".into(), resume: None, plan_only: false, relays: Some(relays) }
}
