//! The snapshot from the best base that there is, in the order of [`bases`]: a backup or a file in place of the server,
//! then a sweep, and a fork of the server last.
//!
//! ```text
//!   look at what is stored, ask the server (INFO) ─▶ order ─▶ first ── not whole, not continued ─▶ the next one
//!                                                               │ it serves
//!                                      data ─▶ slots    journal ◀─ PSYNC at their end ── the server
//! ```
//!
//! Nothing is asked of the server that would make it fork: it says first that it continues the stream. A base that
//! was tried is not tried again for some minutes, so that a replica that it cannot serve gets another one.

use std::time::{Duration, Instant};

use remora_protocol::BaseKind;

use super::method::Method;
use super::snapshot::SnapshotFile;
use super::stream::Following;
use super::with_module::{ModuleError, before};
use super::{Capture, CaptureError, CaptureEvent};
use crate::bases::{self, Candidate, Data, Known, World};
use crate::options::ModuleCapture;
use remora_base::units::Moment;
use remora_base::units::{Size, readable};
use remora_process::rdb_file::{Found, Opened, StoredHead};
use remora_server::Facts;

/// How long a base is not tried again: long enough that the replicas that it does not serve get another one.
const TRIED_FOR: Duration = Duration::from_secs(300);

/// The first version of the formats that only Valkey from 9 on reads.
const OWN_FORMATS: u32 = 80;

/// Which bases were tried lately. The source's loop keeps it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tried(Vec<(String, u64, Instant)>);

impl Tried {
    /// A base has served, or has turned out to be of no use.
    pub(crate) fn note(&mut self, place: &str, offset: u64, now: Instant) {
        self.0.retain(|(_, _, at)| now.saturating_duration_since(*at) < TRIED_FOR);
        self.0.push((place.to_owned(), offset, now));
    }

    fn has(&self, place: &str, offset: u64, now: Instant) -> bool {
        let is_it = |(other, at, since): &(String, u64, Instant)| {
            other == place && *at == offset && now.saturating_duration_since(*since) < TRIED_FOR
        };
        self.0.iter().any(is_it)
    }
}

/// What a found base is to one who chooses. `is_shared`: it is for replicas that read no format of one family alone.
pub(crate) fn candidate(found: &Found, is_shared: bool, tried: &Tried) -> Candidate {
    let known = match &found.head {
        Err(why) => Known::Unusable(why.clone()),
        Ok(head) if tried.has(&found.place, head.offset, Instant::now()) => {
            Known::Unusable("it was tried less than five minutes ago".to_owned())
        }
        Ok(head) if is_shared && head.version >= OWN_FORMATS => {
            Known::Unusable("readers wait that do not know its format".to_owned())
        }
        Ok(StoredHead { history, offset, reaches, taken, .. }) => {
            let age = Duration::from_secs(Moment::now().get().saturating_sub(taken.get()));
            Known::There(Data { history: *history, offset: *offset, reaches: *reaches, age })
        }
    };
    Candidate { kind: found.kind, place: found.place.clone(), known }
}

/// What a server gives: a sweep, if it is wanted, and a fork.
pub(crate) fn of_the_server(capture: ModuleCapture, no_fork: bool, sweep_failed_lately: bool) -> Vec<Candidate> {
    let mut all = Vec::new();
    if capture == ModuleCapture::Sweep {
        let mut sweep = Candidate::new(BaseKind::Sweep);
        // Without a fork there is no other way, and the machine pauses between two attempts.
        if sweep_failed_lately && !no_fork {
            sweep.known = Known::Unusable("a sweep failed a short time ago".to_owned());
        }
        all.push(sweep);
    }
    all.push(Candidate::new(BaseKind::Fork));
    all
}

impl Capture {
    /// Takes the snapshot from the best base. `from_the_server`: has the server fork for it.
    pub(super) fn take_best(
        &self,
        from_the_server: impl FnOnce() -> Result<Following, CaptureError>,
    ) -> Result<Following, CaptureError> {
        let plan = &self.plan;
        let found = plan.stored.as_ref().map(|stored| self.beside_the_runtime(|| stored.look())).unwrap_or_default();
        let facts = match found.is_empty() {
            true => Facts::default(),
            false => self.wait_for(async { Facts::read(&mut plan.server.connect().await?).await })?,
        };
        let is_shared = facts.own_format().is_some() && plan.reader_version.is_none();
        let mut candidates: Vec<_> = found.iter().map(|found| candidate(found, is_shared, &plan.tried)).collect();
        candidates.extend(of_the_server(plan.module.choice, plan.no_fork, plan.sweep_failed_lately));
        let (first, end) = plan.gauge.journal();
        let journal = match plan.journal {
            Some(_) => None,
            None => plan.gauge.replid().map(|history| (history, first, end)),
        };
        let world = World {
            facts: &facts,
            journal,
            journal_bytes: plan.journal_bytes,
            max_age: Duration::MAX,
            no_fork: plan.no_fork,
        };
        let order = bases::order(&candidates, &world);
        let mut whys: Vec<String> = order.passed_over.iter().map(|(_, why)| why.clone()).collect();
        for serves in &order.serve {
            let Some(candidate) = candidates.get(serves.candidate) else { continue };
            let taken = match (candidate.kind, found.get(serves.candidate)) {
                (BaseKind::Backup | BaseKind::File, Some(found)) => {
                    tracing::info!(
                        age = %readable(candidate.age()),
                        behind = %Size::bytes(serves.behind),
                        "the snapshot comes from {}, and the stream behind it from {}", found.place,
                        if serves.with_commands { "there and the server" } else { "the server" }
                    );
                    self.take_stored(found, candidate, serves.with_commands)
                }
                (BaseKind::Sweep, _) => self.swept(),
                _ => return from_the_server(),
            };
            match taken {
                Ok(following) => return Ok(following),
                Err(ModuleError::Final(error)) => return Err(error),
                Err(ModuleError::BeforeSnapshot(why)) => {
                    tracing::warn!(%why, "no snapshot comes from {}; the next base is tried", candidate.name());
                    whys.push(format!("{}: {why}", candidate.name()));
                }
            }
        }
        Err(CaptureError::NeedsFork(whys.join("; ")))
    }

    /// Runs what blocks this thread, and uses the runtime for its connections.
    fn beside_the_runtime<T>(&self, blocking: impl FnOnce() -> T) -> T {
        let _entered = self.plan.runtime.enter();
        blocking()
    }

    /// Takes the snapshot by a sweep.
    fn swept(&self) -> Result<Following, ModuleError> {
        self.sweep().inspect_err(|error| {
            if matches!(error, ModuleError::Final(CaptureError::Module(_))) {
                self.report(CaptureEvent::SweepFailed);
            }
        })
    }

    /// Takes the snapshot from what is stored, and the first of the stream behind it too if `with_commands`.
    fn take_stored(&self, found: &Found, candidate: &Candidate, with_commands: bool) -> Result<Following, ModuleError> {
        let (Some(stored), Ok(head)) = (&self.plan.stored, &found.head) else { return Err(before("it is gone")) };
        let tried = |error: CaptureError| match error {
            CaptureError::File(_) | CaptureError::HistoryGone | CaptureError::HistoryChanged { .. } => {
                self.tried(found, head.offset);
                before(error)
            }
            error => ModuleError::Final(error),
        };
        let opened = self.beside_the_runtime(|| stored.open(found, with_commands, &|| !self.stop.is_set()));
        // One that was stopped is no reason to try the next base.
        self.stop.check().map_err(ModuleError::Final)?;
        let Opened { path, rdb, stream, keeps: _keeps } = opened.map_err(|failure| {
            self.tried(found, head.offset);
            before(failure)
        })?;
        let file = SnapshotFile::of(&path, &rdb).map_err(before)?.with_stream(stream);
        if (file.history(), file.offset()) != (head.history, head.offset) {
            return Err(before("it is another one than a moment ago"));
        }
        let opened = self.open_file(&file).map_err(tried)?;
        self.plan.gauge.set_method(Method::Stored);
        let age = candidate.age();
        self.report(CaptureEvent::FromBase { generation: self.plan.generation, place: found.place.clone(), age });
        let taken = self.take_opened(&file, opened);
        match taken {
            Err(CaptureError::File(why)) => {
                self.tried(found, head.offset);
                Err(ModuleError::Final(CaptureError::Base(format!("{}: {why}", found.place))))
            }
            Err(error) => Err(ModuleError::Final(error)),
            Ok(following) => {
                self.tried(found, head.offset);
                Ok(following)
            }
        }
    }

    fn tried(&self, found: &Found, offset: u64) {
        self.report(CaptureEvent::BaseTried { place: found.place.clone(), offset });
    }
}
