//! `remora backup --journal`: a snapshot, and the commands since, until it is stopped.
//!
//! ```text
//!   source ══ slots ═════▶ snapshot ─╮ whole                      --base-every: the next folder begins,
//!          ══ journal ═══▶ commands ─┴▶ a folder with a name ──── and ends this one when it has its name: no gap
//!                                        │ the source has lost what comes next
//!                                        ╰▶ the next folder, whose manifest says that there is a gap
//! ```
//!
//! - [`recorder`]: the stream as files of commands. **Start here.** [`files`]: where those go.
//! - [`place`]: a folder, its list of files, and how it gets its name. [`sets`]: the same, or an archive of a store.
//! - [`following`]: the journal of the source, across lost connections.
//! - This file: which folder is written when.

pub(super) mod files;
mod following;
mod place;
mod recorder;
mod sets;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_redis::ReplId;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::following::{Ended, Following, From, Why};
use self::sets::Sizes;
use super::manifest::{Gap, Kind, Manifest};
use super::metrics::Seen;
use super::moment::Moment;
use super::rdb_file::RdbFile;
use super::target::Target;
use crate::args::BackupArgs;
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};
use crate::metrics::Scrapes;
use crate::progress;
use crate::replica::data_set::DataSet;
use crate::signals::Signals;
use crate::snapshot::fetch;
use crate::tasks::blocking;
use crate::units::Size;

/// The part of --base-every after which another snapshot is asked for again, if there was none.
const AGAIN_PART: u32 = 8;

/// The shortest time until then.
const AGAIN_LEAST: Duration = Duration::from_secs(1);

/// What all folders of one command have in common.
struct Context {
    args: BackupArgs,
    target: Arc<Target>,
    from: From,
}

/// A folder that has its name, and to which commands are written.
struct Set {
    manifest: Manifest,
    following: Following,
}

/// A folder that begins. `None`: the source has the snapshot of the present one still.
type Beginning = JoinHandle<Result<Option<Set>, Failure>>;

/// Runs until a signal stops it.
///
/// # Errors
/// The source cannot be reached for too long or refuses, or a file cannot be written.
pub(super) async fn run(
    args: BackupArgs,
    target: Arc<Target>,
    seen: Seen,
    scrapes: &mut Scrapes,
) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let from = args.from.clone();
    let security = from.security.open_for(&from.expected, CertificateRoles::default())?;
    let files: Vec<PathBuf> = from.token_file.iter().cloned().collect();
    let tokens = TokenFiles::read(&files, &[], security)?;
    let _rereading = tokens.read_again_on_hangup()?;
    let credentials = tokens.credentials(from.expected.source_key);
    let name = from.name.clone().unwrap_or_else(|| "backup".to_owned());
    let data_set = DataSet::of_a_source(&from.expected);
    let from = From { read: from.read, credentials, data_set, name, sync_every: args.sync_every };
    let context = Arc::new(Context { args, target, from });
    let mut present = scrapes.meanwhile("what is there is being checked", resume(&context)).await?;
    let mut beginning = if present.is_none() { Some(context.begin(None, None)) } else { None };
    let mut due = context.due(present.as_ref());
    loop {
        seen.begins(beginning.is_some());
        seen.records(present.as_ref().map(|set| set.following.recorded()));
        tokio::select! {
            signal = signals.next() => return context.stopped(signal, present, beginning).await,
            scrape = scrapes.next() => {
                let not_ready = present.is_none().then(|| "the first snapshot is not whole yet".to_owned());
                scrape.answer(not_ready);
            }
            done = done(&mut beginning) => {
                beginning = None;
                match done {
                    Ok(Some(set)) => {
                        due = context.due(Some(&set));
                        seen.has(&set.manifest);
                        if let Some(before) = present.replace(set) {
                            let ended = before.following.stop().await;
                            say_ended(&before.manifest, &ended);
                        }
                        context.keep(present.as_ref()).await?;
                    }
                    Ok(None) => due = context.again(),
                    Err(failure) if failure.code == Code::Interrupted || present.is_none() => {
                        return context.failed(failure, present).await;
                    }
                    Err(failure) => {
                        tracing::warn!("no new beginning: {failure}; the commands go on in the present folder");
                        due = context.again();
                    }
                }
            }
            ended = ended(&mut present) => {
                let Some(before) = present.take() else { continue };
                say_ended(&before.manifest, &ended);
                match ended.why {
                    Why::Failed(failure) => return Err(failure),
                    Why::Stopped => return Err(Failure::local("recording stopped by itself; this is a bug of remora")),
                    Why::Gone(because) => {
                        let gap = Gap { after: before.manifest.name.clone(), after_offset: ended.recorded, because };
                        tracing::warn!(
                            "the source has no more of the stream behind {}:{}: {}; a new folder begins, and no moment \
                             between {} and its snapshot can be restored",
                            before.manifest.replid, ended.recorded, gap.because, ended.noted
                        );
                        beginning.get_or_insert_with(|| context.begin(None, Some((before.manifest, gap))));
                    }
                }
            }
            () = tokio::time::sleep_until(due.into()), if beginning.is_none() => {
                due = context.again();
                if let Some(set) = &present {
                    beginning = Some(context.begin(Some(set.manifest.clone()), None));
                }
            }
        }
    }
}

/// Pending while no folder begins.
async fn done(beginning: &mut Option<Beginning>) -> Result<Option<Set>, Failure> {
    match beginning {
        Some(task) => {
            let done = task.await;
            done.unwrap_or_else(|error| Err(Failure::local(format!("a task failed: {error}; this is a bug of remora"))))
        }
        None => std::future::pending().await,
    }
}

/// Pending while there is no folder with commands.
async fn ended(present: &mut Option<Set>) -> Ended {
    match present {
        Some(set) => set.following.ended().await,
        None => std::future::pending().await,
    }
}

/// Goes on with the newest folder, if there is one.
async fn resume(context: &Arc<Context>) -> Result<Option<Set>, Failure> {
    let (target, sizes) = (Arc::clone(&context.target), Sizes::of(&context.args));
    let found = blocking(move || sets::resume(&target, sizes)).await?;
    let Some((manifest, recorder)) = found else { return Ok(None) };
    let address = context.target.address_of(&manifest);
    let history = manifest.replid.parse();
    let history = history.map_err(|error| Failure::refused(format!("{address}: its replid {error}")))?;
    progress::say(&format!("{address}: goes on at {history}:{}", recorder.next_byte()));
    let following = Following::start(context.from.clone(), history, recorder);
    Ok(Some(Set { manifest, following }))
}

fn say_ended(manifest: &Manifest, ended: &Ended) {
    progress::say(&format!("{}: ends at {}:{}, {}", manifest.name, manifest.replid, ended.recorded, ended.noted));
}

impl Context {
    /// Begins a folder. `not`: the present one, whose snapshot is of no use again. `after`: a gap, and what is before
    /// it.
    fn begin(self: &Arc<Self>, not: Option<Manifest>, after: Option<(Manifest, Gap)>) -> Beginning {
        let context = Arc::clone(self);
        tokio::spawn(async move { begin(&context, not, after).await })
    }

    /// When the next folder is due.
    fn due(&self, set: Option<&Set>) -> Instant {
        let every = self.args.base_every;
        let age = set.map_or(0, |set| Moment::now().get().saturating_sub(set.manifest.taken_seconds.get()));
        let left = every.saturating_sub(Duration::from_secs(age)).max(self.pause());
        // As good as never.
        let left = if every.is_zero() { Duration::from_secs(u32::MAX.into()) } else { left };
        Instant::now() + left
    }

    /// When to try again, if there was no new snapshot.
    fn again(&self) -> Instant {
        Instant::now() + self.pause()
    }

    fn pause(&self) -> Duration {
        (self.args.base_every / AGAIN_PART).max(AGAIN_LEAST)
    }

    async fn keep(&self, set: Option<&Set>) -> Result<(), Failure> {
        let (Some(keep), Some(set)) = (self.args.keep, set) else { return Ok(()) };
        let (target, manifest) = (Arc::clone(&self.target), set.manifest.clone());
        blocking(move || {
            target.keep(&manifest, keep);
            Ok(())
        })
        .await
    }

    /// Ends what is written, in order.
    async fn stopped(&self, signal: &str, present: Option<Set>, beginning: Option<Beginning>) -> Result<(), Failure> {
        if let Some(task) = beginning {
            task.abort();
        }
        let Some(set) = present else {
            self.target.stop();
            return Err(Failure::new(Code::Interrupted, format!("stopped by {signal} before the snapshot was whole")));
        };
        let ended = set.following.stop().await;
        say_ended(&set.manifest, &ended);
        match ended.why {
            Why::Failed(failure) => Err(failure),
            _ => Ok(()),
        }
    }

    /// A new folder has failed, or was interrupted as the whole command was.
    async fn failed(&self, failure: Failure, present: Option<Set>) -> Result<(), Failure> {
        match present {
            Some(set) if failure.code == Code::Interrupted => self.stopped("a signal", Some(set), None).await,
            _ => Err(failure),
        }
    }
}

async fn begin(
    context: &Context,
    not: Option<Manifest>,
    after: Option<(Manifest, Gap)>,
) -> Result<Option<Set>, Failure> {
    let began = Instant::now();
    let incoming = context.target.incoming_file();
    let (tell, mut begun) = watch::channel(None);
    let args = context.args.fetch(&incoming);
    let (data_set, mut unasked) = (context.from.data_set.clone(), Scrapes::default());
    let mut fetching = Box::pin(fetch::to_file_telling(
        &args,
        data_set,
        move |origin| _ = tell.send_replace(Some(origin)),
        &mut unasked,
    ));
    let mut recording: Option<(ReplId, u64, sets::Beginning, Following)> = None;
    let fetched = loop {
        tokio::select! {
            done = &mut fetching => break done?,
            Ok(()) = begun.changed() => {
                let Some(origin) = *begun.borrow_and_update() else { continue };
                let is_same = |not: &Manifest| not.replid == origin.history.to_string() && not.offset == origin.offset;
                if not.as_ref().is_some_and(is_same) {
                    return Ok(None);
                }
                if let Some((.., before)) = recording.take() {
                    before.stop().await;
                }
                recording = Some(record(context, origin.history, origin.offset).await?);
            }
        }
    };
    drop(fetching);
    let rdb = blocking(move || RdbFile::read(&incoming)).await?;
    let is_of = |history: &ReplId, offset: u64| history.to_string() == rdb.replid && offset == rdb.offset;
    let (_, _, set, following) = match recording.take() {
        Some(recording) if is_of(&recording.0, recording.1) => recording,
        other => {
            if let Some((.., before)) = other {
                before.stop().await;
            }
            let history = rdb.replid.parse();
            let history = history.map_err(|error| Failure::refused(format!("the snapshot's replid {error}")))?;
            record(context, history, rdb.offset).await?
        }
    };
    let mut manifest = Manifest::of(Kind::Journal, &rdb, &fetched.server, context.args.from.read.source.to_string());
    // A snapshot that was taken before the last command of the earlier folder leaves no gap.
    manifest.gap = after
        .filter(|(before, gap)| before.replid != manifest.replid || gap.after_offset < manifest.offset)
        .map(|(_, gap)| gap);
    let target = Arc::clone(&context.target);
    let manifest = blocking(move || set.publish(&target, &rdb, &manifest)).await?;
    progress::say(&format!(
        "{}: {} of {} at {}:{}, taken {}, in {:.2} s; the commands since are recorded",
        context.target.address_of(&manifest),
        Size::bytes(manifest.bytes),
        manifest.server,
        manifest.replid,
        manifest.offset,
        manifest.taken,
        began.elapsed().as_secs_f64()
    ));
    Ok(Some(Set { manifest, following }))
}

/// Begins to record what follows a snapshot, without a name.
async fn record(
    context: &Context,
    history: ReplId,
    offset: u64,
) -> Result<(ReplId, u64, sets::Beginning, Following), Failure> {
    let (target, sizes) = (Arc::clone(&context.target), Sizes::of(&context.args));
    let (set, recorder) = blocking(move || sets::begin(&target, sizes, offset)).await?;
    Ok((history, offset, set, Following::start(context.from.clone(), history, recorder)))
}
