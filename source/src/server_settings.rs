//! Settings of the captured server: those that the source changes for the moment of the fork (`--tune-server`), and the
//! limit of the output buffer, which it watches ([`OutputWatch`]).

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::options::TuningOptions;
use remora_base::pace::Growth;
use remora_base::units::Size;
use remora_process::AbortOnDrop;
use remora_process::exit::Failure;
use remora_process::record::{self, Record};
use remora_server::{Client, Facts, OutputLimit, Server, ServerError};

// Tuning: two settings of the server that make a snapshot slow, changed for the moment of the fork (`--tune-server`).
//
// A server with default settings waits before it forks for a replica, in case more of them come
// (`repl-diskless-sync-delay`, 5 s), and its child compresses the snapshot (`rdbcompression`). A source serves all
// replicas with one snapshot and sends it over a faster way, so it needs neither. The child has the settings of the
// moment of the fork: they are put back as soon as the server has announced the snapshot.
//
// ```text
//   values to the record file ──▶ CONFIG SET ──▶ PSYNC ──▶ +FULLRESYNC: forked ──▶ CONFIG SET back ──▶ file removed
//          └─ the source is killed: the next one for this server puts them back ────────────┘
// ```
//
// A setting that another client has changed meanwhile is left as it is ([`Record`] says why that is known).

/// What the settings are changed to.
const SETTINGS: [(&str, &str); 2] = [(record::SYNC_DELAY, "0"), (record::COMPRESSION, "no")];

/// How long the source tries to put the settings back while it runs. A server answers within milliseconds after a fork;
/// one that is restarting takes longer, and then has the settings of its file.
const PUT_BACK_LIMIT: Duration = Duration::from_secs(60);

/// Pause before the next try.
const PUT_BACK_PAUSE: Duration = Duration::from_millis(500);

/// How long a source that ends waits for the server to take the settings back.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The settings of the server that the source changes for the moment of the fork.
pub(crate) struct Tuning {
    is_wanted: bool,
    state_dir: Option<PathBuf>,
    /// How long the server waits before it forks, in seconds; 0 if it does not, or does not say.
    delay: AtomicU64,
    /// What is changed at this moment.
    changed: tokio::sync::Mutex<Option<Changed>>,
    /// The task that puts it back.
    putting_back: Mutex<Option<AbortOnDrop>>,
}

/// Settings that a server has from the source, or may have if the source was interrupted.
struct Changed {
    server: Server,
    record: Record,
}

impl Tuning {
    pub(crate) fn new(options: &TuningOptions) -> Tuning {
        Tuning {
            is_wanted: options.is_wanted,
            state_dir: options.state_dir.clone(),
            delay: AtomicU64::new(0),
            changed: tokio::sync::Mutex::default(),
            putting_back: Mutex::default(),
        }
    }

    /// Asks the server how long it waits before it forks.
    pub(crate) async fn learn(&self, client: &mut Client) {
        let mut get = async |name| client.config_get(name).await.ok().flatten();
        let delay = match get("repl-diskless-sync").await.as_deref() {
            Some("yes") => get(record::SYNC_DELAY).await.and_then(|text| text.parse().ok()),
            _ => None,
        };
        self.delay.store(delay.unwrap_or(0), Relaxed);
    }

    /// How long the server waits before it forks, in seconds; 0 if it does not, or does not say.
    pub(crate) fn fork_delay(&self) -> u64 {
        self.delay.load(Relaxed)
    }

    /// Whether the source does without that wait.
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// What a replica is told that waits for the snapshot.
    pub(crate) fn explained(&self, text: String) -> String {
        match self.delay.load(Relaxed) {
            delay if delay > 0 && !self.is_wanted => format!(
                "{text}; the server waits {delay} s before it forks, in case more replicas come ({}): remora source \
                 --tune-server does without",
                record::SYNC_DELAY
            ),
            _ => text,
        }
    }

    /// Puts back what a source that was killed has left changed.
    ///
    /// # Errors
    /// The state folder cannot be used, and the settings are to be changed.
    pub(crate) async fn recover(&self, server: &Server) -> Result<(), Failure> {
        let url = server.url().to_string();
        if !self.is_wanted && !record::is_left_by_a_source(self.state_dir.as_deref(), &url) {
            return Ok(());
        }
        let mut changed = self.changed.lock().await;
        // Another source that runs beside this server puts them back by itself.
        let Some(record) = Record::of_a_source(self.state_dir.as_deref(), &url)? else { return Ok(()) };
        *changed = Some(Changed { server: server.clone(), record });
        if let Err(error) = put_back(&mut changed).await {
            tracing::warn!(%error, "the settings that a source which was killed has changed at the server can't be put back");
        }
        Ok(())
    }

    /// Changes the settings, before the server is asked for a snapshot. A snapshot with the server's own settings is
    /// better than none: a failure is logged only.
    pub(crate) async fn change(&self, server: &Server) {
        if !self.is_wanted {
            return;
        }
        // The task of an earlier snapshot must not put back what is changed now.
        drop(self.task(None));
        let mut changed = self.changed.lock().await;
        if let Err(error) = put_back(&mut changed).await {
            return tracing::warn!(%error, "the server's settings are not changed: those of an earlier snapshot can't be put back");
        }
        let record = match Record::of_a_source(self.state_dir.as_deref(), &server.url().to_string()) {
            Ok(Some(record)) => record,
            Ok(None) => {
                return tracing::info!("another source beside this server has changed its settings for a snapshot");
            }
            Err(error) => return tracing::warn!(%error, "the server's settings are not changed for the snapshot"),
        };
        // Kept before the first command: the caller may be interrupted between two of them.
        let change = changed.insert(Changed { server: server.clone(), record });
        let done = change.all().await;
        match done {
            Ok(()) => tracing::info!("the server neither waits nor compresses for this snapshot (--tune-server)"),
            Err(error) => {
                tracing::warn!(%error, "the server's settings are not changed for the snapshot");
                if let Err(error) = put_back(&mut changed).await {
                    tracing::warn!(%error, "settings of the server can't be put back yet");
                }
            }
        }
    }

    /// Begins to put the settings back: the server has forked, or will not.
    pub(crate) fn end(self: &Arc<Tuning>, runtime: &tokio::runtime::Handle) {
        if !self.is_wanted {
            return;
        }
        let tuning = Arc::clone(self);
        let task = runtime.spawn(async move { tuning.put_back_within(PUT_BACK_LIMIT).await });
        drop(self.task(Some(AbortOnDrop::new(&task))));
    }

    /// Puts the settings back before the source ends.
    pub(crate) async fn close(&self) {
        drop(self.task(None));
        if tokio::time::timeout(END_LIMIT, self.put_back_within(END_LIMIT)).await.is_err() {
            tracing::warn!(
                "the server did not take its settings back ({}, {}): the next source beside it will put them back",
                record::SYNC_DELAY,
                record::COMPRESSION
            );
        }
    }

    async fn put_back_within(&self, limit: Duration) {
        let began = Instant::now();
        loop {
            let error = match put_back(&mut *self.changed.lock().await).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if began.elapsed() > limit {
                return tracing::warn!(
                    %error,
                    "the server's {} and {} can't be put back: the next snapshot, or the next source beside it, will try again",
                    record::SYNC_DELAY,
                    record::COMPRESSION
                );
            }
            tokio::time::sleep(PUT_BACK_PAUSE).await;
        }
    }

    /// Exchanges the task that puts the settings back.
    fn task(&self, task: Option<AbortOnDrop>) -> Option<AbortOnDrop> {
        let mut present = self.putting_back.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *present, task)
    }
}

impl Changed {
    async fn all(&mut self) -> Result<(), Failure> {
        let mut client = self.server.connect().await?;
        for (name, value) in SETTINGS {
            let Some(present) = record::present(&mut client, name).await? else { continue };
            let before = self.record.original(name, &present);
            if !self.record.change(&mut client, name, &before, value.as_bytes()).await? {
                let text = format!(
                    "the server refuses CONFIG SET {name} {value}: --tune-server needs the rule +config|set, and a server \
                     that lets this setting be changed"
                );
                return Err(Failure::refused(text));
            }
        }
        Ok(())
    }
}

/// Puts back what is changed. Nothing is changed afterwards, unless this fails.
async fn put_back(changed: &mut Option<Changed>) -> Result<(), ServerError> {
    let Some(Changed { server, record }) = changed else { return Ok(()) };
    if record.has_settings() {
        let mut client = server.connect().await?;
        record.put_back(&mut client).await?;
    }
    record.close();
    *changed = None;
    Ok(())
}

// The primary's output buffer for the source, and its limit.
//
// If snapshot and stream share one connection, the primary holds the stream back until the source has read the
// snapshot. It holds it in the output buffer of that connection. A windowed snapshot is read at the pace of the
// slowest replica, so the buffer grows for as long as that takes. When it reaches `client-output-buffer-limit`, the
// primary closes the connection and the snapshot has failed. Each further attempt ends in the same way.

/// What the server holds back for a source, and what limits it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputBuffer {
    limit: OutputLimit,
    /// Whether the server sends snapshot and stream over two connections, so that it holds nothing back.
    two_channels: bool,
}

impl OutputBuffer {
    /// Asks the server. `facts` must be fresh.
    pub(crate) async fn read(client: &mut Client, facts: &Facts) -> OutputBuffer {
        let limit = OutputLimit::read(client, facts).await;
        let two_channels = client.config_get("dual-channel-replication-enabled").await.ok().flatten();
        OutputBuffer { limit, two_channels: two_channels.is_some_and(|text| text == "yes") }
    }

    /// The limit, if a buffer that has grown to `held` bytes within `took` reaches it.
    pub(crate) fn reached(&self, held: u64, took: Duration) -> Option<OutputLimit> {
        self.limit.is_reached(held, took).then_some(self.limit)
    }

    /// A warning for the plan of a replica: a windowed snapshot of about `expected` bytes may reach the limit. Empty if
    /// it cannot.
    fn warning(&self, expected: u64, ring: u64, rate: u64) -> String {
        if self.two_channels || self.limit.is_none() {
            return String::new();
        }
        let bound = match self.limit.time_at(rate) {
            None => "a snapshot fails if more than that is written while the replicas read it".to_owned(),
            Some(time) => format!(
                "at the {}/s that clients write now it is reached after {} s, so the slowest replica must read {}/s or more",
                Size::bytes(rate),
                time.as_secs(),
                Size::bytes((expected as f64 / time.as_secs_f64().max(1e-3)) as u64)
            ),
        };
        format!(
            "the data set (about {}) does not fit in the source's memory for the snapshot ({}), so the primary holds back what clients \
             write until the replicas have read it; its client-output-buffer-limit for replicas is {}: {bound}; {REMEDY}",
            Size::bytes(expected),
            Size::bytes(ring),
            self.limit
        )
    }
}

/// What to do about the limit.
pub(crate) const REMEDY: &str = "raise the limit on the primary, give the source more --memory, or set \
    dual-channel-replication-enabled yes on a Valkey primary";

/// The source's last look at its primary: the output buffer, and how fast clients write.
#[derive(Default)]
pub(super) struct OutputWatch {
    buffer: Option<OutputBuffer>,
    growth: Growth,
    /// Bytes per second between the last two looks.
    rate: u64,
}

impl OutputWatch {
    /// Two looks that are less apart give no rate.
    const SPAN: Duration = Duration::from_millis(500);

    /// The server was asked.
    pub(super) fn learned(&mut self, now: Instant, facts: &Facts, buffer: OutputBuffer) {
        self.buffer = Some(buffer);
        if let Some(rate) = facts.offset.and_then(|offset| self.growth.look(now, offset, Self::SPAN)) {
            self.rate = rate as u64;
        }
    }

    /// A warning for the plan of a replica; empty if the plan needs no warning.
    pub(super) fn warning(&self, expected: u64, ring: u64) -> String {
        self.buffer.map_or_else(String::new, |buffer| buffer.warning(expected, ring, self.rate))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SETTING: &str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60";

    #[test]
    fn a_warning_names_the_limit_the_time_and_the_pace_that_is_needed() {
        let limit = OutputLimit::parse(SETTING).unwrap();
        let buffer = OutputBuffer { limit, two_channels: false };
        let text = buffer.warning(10 << 30, 1 << 30, 32 << 20);
        for part in ["client-output-buffer-limit", "256 MiB, or 64 MiB for 60 s", "after 8 s", "1.25 GiB/s", "--memory"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(buffer.warning(10 << 30, 1 << 30, 0).contains("while the replicas read it"));
        assert_eq!(OutputBuffer { two_channels: true, ..buffer }.warning(1, 1, 1), "");
    }

    #[test]
    fn the_write_rate_follows_from_two_looks() {
        let (mut watch, start) = (OutputWatch::default(), Instant::now());
        let buffer = OutputBuffer { limit: OutputLimit::DEFAULT, two_channels: false };
        let at = |offset| Facts { offset: Some(offset), ..Facts::default() };
        watch.learned(start, &at(1000), buffer);
        watch.learned(start + Duration::from_secs(2), &at(5000), buffer);
        assert_eq!(watch.rate, 2000);
        watch.learned(start + Duration::from_secs(3), &at(0), buffer);
        assert_eq!(watch.rate, 0);
    }
}
