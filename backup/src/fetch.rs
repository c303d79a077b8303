//! Fetch: a source's snapshot as a file in its place, for a server that is started on it, or as a backup; or to
//! standard output.
//!
//! ```text
//!   slots ──▶ /data/.dump.rdb.remora/slots ── whole ──▶ checksum ──▶ on the disk ──▶ would the primary continue?
//!                                                                                         │ yes, or --allow-stale
//!                                                                   /data/dump.rdb ◀──────┘ no: exit code 16
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use remora_protocol::Offer;
use remora_redis::rdb::crc64;
use remora_table::{Origin, Slot};
use serde::Serialize;

use crate::mount::{Found, Kept, Shelf};
use crate::options::{FetchOptions, ReplicaOf};
use crate::receiving::{Arrived, Reception, end, outcome};
use crate::receiving::{Keeper, Reached, Stage, Target};
use remora_base::files::{self, Claim, Folder, Placing};
use remora_base::units::{Size, readable};
use remora_metrics::{Families, Scrape, Scrapes, register as all};
use remora_process::blocking;
use remora_process::exit::{Code, Failure};
use remora_process::exit::{Patience, RETRY_FOR};
use remora_process::progress;
use remora_process::signals::Signals;
use remora_reader::spool::{Held, SnapshotId, Spool};

/// A fetch that is under way, and the signals that stop it.
struct Fetch {
    signals: Signals,
    reception: Reception,
}

impl Fetch {
    fn start(options: &FetchOptions, target: Arc<dyn Target>) -> Result<Fetch, Failure> {
        let signals = Signals::catch()?;
        Ok(Fetch { signals, reception: Reception::start(&options.from, target, true, options.pass_on.as_ref())? })
    }

    /// Waits until the whole snapshot has arrived. `left`: what a signal leaves. `begun` is called when a snapshot has
    /// begun to arrive, and again when another one has; `asked` for each question of those who watch.
    async fn arrived(
        mut self,
        left: &str,
        begun: impl Fn(),
        scrapes: &mut Scrapes,
        asked: impl Fn(Scrape),
    ) -> Result<Arrived, Failure> {
        let signal = loop {
            tokio::select! {
                done = &mut self.reception.running => match outcome(done)? {
                    Some(arrived) => return Ok(arrived),
                    None => return Err(Failure::local("the snapshot did not arrive; this is a bug of remora, please report it")),
                },
                Ok(()) = self.reception.begun.changed() => begun(),
                scrape = scrapes.next() => asked(scrape),
                signal = self.signals.next() => break signal,
            }
        };
        end(self.reception.running, &self.reception.stop).await?;
        Err(Failure::new(Code::Interrupted, format!("stopped by {signal}{left}")))
    }
}

/// Fetches into a file. `begun` is told of the snapshot that has begun to arrive, and of another one if that begins
/// instead. Those who watch are told how far it is.
///
/// # Errors
/// The file is refused, the source cannot be reached, there is no room, or the primary would not continue from the
/// file.
pub async fn to_file(
    options: &FetchOptions,
    begun: impl Fn(Origin),
    scrapes: &mut Scrapes,
) -> Result<Summary, Failure> {
    receive(options, begun, scrapes).await?.place(options).await
}

/// A snapshot that has arrived beside its place, is right and on the disk, and from which the primary would continue.
pub struct Whole {
    target: Arc<FileTarget>,
    arrived: Arrived,
    summary: Summary,
}

/// Receives a snapshot up to the point where it can be put in its place.
///
/// # Errors
/// As [`to_file`].
pub async fn receive(options: &FetchOptions, begun: impl Fn(Origin), scrapes: &mut Scrapes) -> Result<Whole, Failure> {
    let began = Instant::now();
    let (to, replaces) = (options.to.clone(), options.placing.replaces);
    let opened = blocking(move || FileTarget::open(&to, replaces));
    let target = scrapes.meanwhile("what an earlier fetch has left is being checked", opened).await?;
    let target = Arc::new(target);
    let folder = target.folder().to_owned();
    let left = format!("; what has arrived is in {}, and the same command goes on there", folder.display());
    let fetch = Fetch::start(options, Arc::clone(&target) as Arc<dyn Target>)?;
    let tell = || {
        if let Some(kept) = target.present() {
            begun(kept.origin());
        }
    };
    let asked = |mut scrape: Scrape| {
        if let Some(kept) = target.present() {
            let Reached { bytes, slots, .. } = kept.reached();
            scrape.families.number(&all::FETCH_BYTES, bytes);
            scrape.families.number(&all::FETCH_SLOTS, slots);
        }
        scrape.answer(None);
    };
    let arrived = fetch.arrived(&left, tell, scrapes, asked).await?;
    let summary = Summary::of(options, &arrived, began);
    let whole = Whole { target, arrived, summary };
    if !options.allow_stale {
        whole.refuse_if_stale(options)?;
    }
    Ok(whole)
}

impl Whole {
    /// The file, before it gets its name.
    pub fn file(&self) -> PathBuf {
        self.target.slots()
    }

    /// The history and the offset of the snapshot.
    pub fn origin(&self) -> Origin {
        self.arrived.kept.origin()
    }

    /// Refuses a snapshot from which the primary would not continue for long enough, by its backlog alone.
    ///
    /// # Errors
    /// Why not, and where the snapshot is.
    pub fn refuse_if_stale(&self, options: &FetchOptions) -> Result<(), Failure> {
        let Some(stale) = self.summary.stale(options.need) else { return Ok(()) };
        let text = format!(
            "{}: a server that starts on it would need a full sync: {stale}. It was not put in place, and is {}; raise \
             repl-backlog-size at the primary",
            options.to.display(),
            self.file().display()
        );
        Err(Failure::new(Code::Stale, text))
    }

    /// Puts it in its place.
    ///
    /// # Errors
    /// A file beside it cannot be written, or it cannot be given its owner or its name.
    pub async fn place(self, options: &FetchOptions) -> Result<Summary, Failure> {
        let Whole { target, arrived, summary } = self;
        let how = options.placing;
        // Before the snapshot: a server that finds it, and is not a replica, would take the data for its own.
        write_replicaof(options, &arrived, &summary).await?;
        drop(arrived);
        let place = move || match Arc::into_inner(target) {
            Some(target) => target.place(&how),
            None => Err(Failure::local("the slots are still in use; this is a bug of remora, please report it")),
        };
        blocking(place).await?;
        Ok(summary)
    }
}

/// Writes the file by which a server that starts on the snapshot is a replica.
async fn write_replicaof(options: &FetchOptions, arrived: &Arrived, summary: &Summary) -> Result<(), Failure> {
    let Some(ReplicaOf { file, sentinels }) = options.replicaof.clone() else { return Ok(()) };
    let (host, port) = match sentinels {
        Some(sentinels) => {
            // The snapshot is there: what passes must not throw it away.
            let mut patience = Patience::new(options.from.read.retry_for, RETRY_FOR);
            let primary = loop {
                match sentinels.primary().await {
                    Ok(primary) => break primary,
                    Err(error) => tokio::time::sleep(patience.after(Instant::now(), error.into())?).await,
                }
            };
            (primary.host, primary.port)
        }
        None => (primary_host(options, &arrived.plan), summary.primary_port),
    };
    let line = format!("replicaof {host} {port}\n");
    let how = Placing { replaces: true, ..options.placing };
    blocking(move || Ok(files::write(&file, line.as_bytes(), &how)?)).await
}

/// Fetches to standard output, as the snapshot arrives. Until it is written, it is kept in the file system of the
/// folder `spool`, in a file without a name.
///
/// # Errors
/// The source cannot be reached, there is no room, or nobody reads standard output any more.
pub async fn to_stdout(options: &FetchOptions, spool: &Path) -> Result<Summary, Failure> {
    let began = Instant::now();
    let shelf = Arc::new(Shelf::new(spool));
    let mut fetch = Fetch::start(options, Arc::clone(&shelf) as Arc<dyn Target>)?;
    let (tell, mut written) = tokio::sync::oneshot::channel();
    let (mut begun, source) = (fetch.reception.begun.clone(), Arc::clone(&shelf));
    let writing = async move {
        let is_begun = begun.wait_for(|begun| *begun).await.is_ok();
        let kept = source.shown().filter(|_| is_begun).map(|(_, kept)| kept);
        let Some(kept) = kept else { return };
        // A thread of its own, which the end of the process does not wait for: the pipe may take nothing more.
        let spawned = std::thread::Builder::new()
            .name("stdout".into())
            .spawn(move || _ = tell.send(write_out(&kept, &mut io::stdout().lock())));
        if let Err(error) = spawned {
            tracing::error!("no thread for standard output: {error}");
        }
    };
    tokio::spawn(writing);
    let mut arrived = None;
    loop {
        tokio::select! {
            done = &mut fetch.reception.running, if arrived.is_none() => match outcome(done)? {
                Some(whole) => arrived = Some(whole),
                None => return Err(Failure::local("the snapshot did not arrive; this is a bug of remora, please report it")),
            },
            result = &mut written => {
                let result = result.unwrap_or_else(|_| Err(io::Error::other("it was not written")));
                match (result, arrived.take()) {
                    (Ok(_), Some(arrived)) => return Ok(Summary::of(options, &arrived, began)),
                    // All of it has been written, and the source is just being asked about the primary.
                    (Ok(_), None) => {
                        let arrived = fetch.arrived("", || {}, &mut Scrapes::default(), |_| {}).await?;
                        return Ok(Summary::of(options, &arrived, began));
                    }
                    (Err(error), _) => {
                        return Err(Failure::local(format!("standard output has not got the whole snapshot: {error}")));
                    }
                }
            }
            signal = fetch.signals.next() => {
                fetch.reception.stop.send_replace(true);
                let text = format!("stopped by {signal}: standard output has not got the whole snapshot");
                return Err(Failure::new(Code::Interrupted, text));
            }
        }
    }
}

/// The host at which a server on this host reaches the primary.
fn primary_host(options: &FetchOptions, plan: &Offer) -> String {
    if plan.primary.host.is_empty() {
        options.from.read.source.present().host.clone()
    } else {
        plan.primary.host.clone()
    }
}

/// What was fetched.
#[derive(Debug, Serialize)]
pub struct Summary {
    to: PathBuf,
    /// The server whose data it has.
    pub server: String,
    primary_port: u16,
    /// The history of the snapshot.
    pub replid: String,
    /// The last byte of that history which it has.
    pub offset: u64,
    /// The length of the file.
    pub bytes: u64,
    seconds: f64,
    /// Why the primary would not continue from the file; empty if it would.
    not_continued_because: String,
    /// For about this many seconds from now it would, if as much is written as lately. `None`: as long as nothing is
    /// written.
    headroom_seconds: Option<u64>,
    backlog_bytes: u64,
    write_rate: u64,
}

impl Summary {
    fn of(options: &FetchOptions, arrived: &Arrived, began: Instant) -> Summary {
        let Origin { history, offset, .. } = arrived.kept.origin();
        let plan = &arrived.plan;
        let behind = plan.offset.saturating_sub(offset);
        let room = plan.backlog_bytes.saturating_sub(behind);
        let covered = arrived.covered.clone().unwrap_or_else(|| Err("the primary was not asked".to_owned()));
        Summary {
            to: options.to.clone(),
            server: plan.server.clone(),
            primary_port: plan.primary.port,
            replid: history.to_string(),
            offset,
            bytes: arrived.kept.reached().bytes,
            seconds: began.elapsed().as_secs_f64(),
            headroom_seconds: if covered.is_ok() { room.checked_div(plan.write_rate) } else { Some(0) },
            not_continued_because: covered.err().unwrap_or_default(),
            backlog_bytes: plan.backlog_bytes,
            write_rate: plan.write_rate,
        }
    }

    /// Why the file is too old for a server that starts on it; `None` if it is not.
    fn stale(&self, need: Duration) -> Option<String> {
        if !self.not_continued_because.is_empty() {
            return Some(self.not_continued_because.clone());
        }
        let headroom = self.headroom_seconds.filter(|seconds| *seconds < need.as_secs())?;
        Some(format!(
            "the primary would continue from it for {} only, and {} are needed (a backlog of {}, {} written a second)",
            readable(Duration::from_secs(headroom)),
            readable(need),
            Size::bytes(self.backlog_bytes),
            Size::bytes(self.write_rate)
        ))
    }

    /// Shows it to those who watch.
    pub fn measure(&self, families: &mut Families) {
        families.number(&all::FETCH_BYTES, self.bytes);
        families.number(&all::FETCH_OFFSET, self.offset);
        if let Some(seconds) = self.headroom_seconds {
            families.number(&all::FETCH_HEADROOM, seconds);
        }
    }

    /// Says it in words.
    pub fn show(&self) {
        let good = match (&*self.not_continued_because, self.headroom_seconds) {
            ("", None) => "the primary continues from it as long as nothing is written".to_owned(),
            ("", Some(seconds)) => format!(
                "the primary continues from it for about {} (backlog {}, {} written a second)",
                readable(Duration::from_secs(seconds)),
                Size::bytes(self.backlog_bytes),
                Size::bytes(self.write_rate)
            ),
            (why, _) => format!("a server that starts on it as a replica takes a full sync: {why}"),
        };
        progress::say(&format!(
            "{}: {} of {} at {}:{}, in {:.2} s; {good}",
            self.to.display(),
            Size::bytes(self.bytes),
            self.server,
            self.replid,
            self.offset,
            self.seconds
        ));
    }
}

// Out: a snapshot to standard output, as it arrives.
//
// The bytes are kept in a file without a name first, so that a reader at the other end of the pipe that takes its time
// holds up neither the source nor its other replicas.

/// Bytes that are written at a time.
const OUT_PIECE: u64 = 1 << 20;

/// Writes a snapshot to its end. Blocks: for a thread that the end of the process does not wait for.
///
/// # Errors
/// The other end has gone, or the snapshot will not become whole.
pub(crate) fn write_out(kept: &Arc<Kept>, out: &mut impl Write) -> io::Result<u64> {
    let mut at = 0;
    loop {
        let (tell, found) = mpsc::sync_channel(1);
        kept.when_there(at, at, Box::new(move |there| _ = tell.send(there))); // this thread waits for it
        match found.recv().map_err(io::Error::other)? {
            Found::Bytes(there) => {
                let bytes = kept.read(at, there.min(OUT_PIECE) as usize)?;
                out.write_all(&bytes)?;
                at += bytes.len() as u64;
            }
            Found::End => {
                out.flush()?;
                return Ok(at);
            }
            Found::Lost | Found::Interrupted => {
                return Err(io::Error::other(format!("after {at} bytes no more of the snapshot came")));
            }
        }
    }
}

// File: the slots of a snapshot beside the file that they become.
//
// ```text
//   /data/.dump.rdb.remora/      a state folder, as a replica's --state-dir: slots, held, origin.json
//   /data/dump.rdb               its file `slots`, renamed once it is whole, checked and on the disk
// ```
//
// The slots lie in the folder's file as in the snapshot, one behind the other. So the file is the snapshot, and a
// fetch that is started again goes on behind the slots that are there and right.

/// A file that a snapshot becomes.
pub(crate) struct FileTarget {
    to: PathBuf,
    /// Where its slots are until then.
    folder: PathBuf,
    present: Mutex<Option<Arc<Partial>>>,
    _claim: Claim,
}

/// The slots of one snapshot.
struct Partial {
    snapshot: SnapshotId,
    state: Mutex<State>,
}

struct State {
    spool: Spool,
    bytes: u64,
    stage: Stage,
}

/// Bytes that are read at a time for the checksum.
const PIECE: usize = 1 << 20;

/// The checksum at the end of an RDB file.
const CHECKSUM_BYTES: u64 = 8;

impl FileTarget {
    /// Finds what an earlier fetch has left, and reads all of it to check it.
    ///
    /// # Errors
    /// There is a file already and it is not to be replaced, another fetch is at work, or the folder cannot be used.
    pub(crate) fn open(to: &Path, replaces: bool) -> Result<FileTarget, Failure> {
        let Some(name) = to.file_name() else {
            return Err(Failure::refused(format!("{} is not the name of a file", to.display())));
        };
        if !replaces && to.symlink_metadata().is_ok() {
            return Err(Failure::refused(format!("{} exists; replace it by --replace", to.display())));
        }
        let folder = to.with_file_name(format!(".{}.remora", name.to_string_lossy()));
        let unusable = |error: io::Error| {
            Failure::local(format!("{} cannot be used for the slots that arrive: {error}", folder.display()))
        };
        let claim = Folder::open(&folder).and_then(|folder| folder.claim()).map_err(unusable)?;
        let Some(claim) = claim else {
            let text = format!("another remora fetch writes {}; wait for it, or end it", to.display());
            return Err(Failure::refused(text));
        };
        let found = Spool::find(&folder).map(|spool| Arc::new(Partial::new(spool)));
        Ok(FileTarget { to: to.to_owned(), folder, present: Mutex::new(found), _claim: claim })
    }

    /// Where the slots are, and what is known of them.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The slots, which become the file.
    pub(crate) fn slots(&self) -> PathBuf {
        self.folder.join("slots")
    }

    /// Puts the file in its place, with its name on the disk, and removes the folder.
    ///
    /// # Errors
    /// The owner or the name cannot be given to it, or another file has the name by now.
    pub(crate) fn place(self, how: &Placing) -> Result<(), Failure> {
        let slots = self.slots();
        let opened = File::open(&slots);
        let file = opened
            .map_err(|error| Failure::local(format!("{}: its slots cannot be opened: {error}", self.to.display())))?;
        files::put(&file, &slots, &self.to, how)?;
        // It holds records of slots only; if it cannot be removed, the next fetch begins anew.
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            tracing::warn!("{} cannot be removed: {error}", self.folder.display());
        }
        Ok(())
    }

    fn lock_present(&self) -> MutexGuard<'_, Option<Arc<Partial>>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for FileTarget {
    fn present(&self) -> Option<Arc<dyn Keeper>> {
        self.lock_present().clone().map(|partial| partial as Arc<dyn Keeper>)
    }

    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>> {
        let mut present = self.lock_present();
        // Its files are closed before they are used for another one.
        if let Some(before) = present.take_if(|partial| partial.snapshot != snapshot) {
            before.lose();
        }
        let partial = match &*present {
            Some(partial) if partial.state().stage == Stage::Arriving => Arc::clone(partial),
            _ => Arc::new(Partial::new(Spool::open(&self.folder, &snapshot, None)?)),
        };
        *present = Some(Arc::clone(&partial));
        Ok(partial)
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn failure(&self, error: &io::Error) -> Failure {
        let folder = self.folder.display();
        match error.kind() {
            io::ErrorKind::InvalidData => Failure::local(format!("{}: {error}", self.to.display())),
            _ => Failure::local(format!(
                "the slots cannot be written into {folder}: {error}; make room there for the whole snapshot"
            )),
        }
    }
}

impl Partial {
    fn new(spool: Spool) -> Partial {
        let bytes = (0..spool.held_below()).filter_map(|number| spool.get(number)).map(|held| u64::from(held.length));
        let bytes = bytes.sum();
        Partial { snapshot: spool.snapshot(), state: Mutex::new(State { spool, bytes, stage: Stage::Arriving }) }
    }

    /// What it has is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Partial {
    fn origin(&self) -> Origin {
        self.snapshot.origin
    }

    fn reached(&self) -> Reached {
        let state = self.state();
        Reached { bytes: state.bytes, slots: state.spool.held_below(), stage: state.stage }
    }

    fn keep(&self, slot: &Slot) -> io::Result<Held> {
        let crc = slot.crc().map_err(io::Error::other)?;
        self.state().spool.store(slot, crc)
    }

    fn add(&self, held: Held) -> io::Result<()> {
        let mut state = self.state();
        state.spool.remember(held)?;
        state.bytes += u64::from(held.length);
        Ok(())
    }

    fn complete(&self) -> io::Result<()> {
        let (file, bytes) = {
            let state = self.state();
            (state.spool.file().try_clone()?, state.bytes)
        };
        file.set_len(bytes)?;
        check_or_add(&file, bytes)?;
        file.sync_all()?;
        self.state().stage = Stage::Whole;
        Ok(())
    }

    fn lose(&self) {
        let mut state = self.state();
        if state.stage == Stage::Arriving {
            state.stage = Stage::Lost;
        }
    }
}

/// Reads the whole file, and compares its checksum with the one at its end. A server with `rdbchecksum no` writes zero
/// there. Each slot was checked by a checksum of its own, so the file gets the right one, by which any server finds
/// what changes later.
fn check_or_add(file: &File, bytes: u64) -> io::Result<()> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let Some(end) = bytes.checked_sub(CHECKSUM_BYTES) else {
        return Err(invalid(format!("an RDB file of {bytes} bytes has no checksum")));
    };
    let (mut at, mut crc, mut piece) = (0, 0, vec![0; PIECE]);
    while at < end {
        let length = (end - at).min(PIECE as u64) as usize;
        let piece = piece.get_mut(..length).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        crc = crc64(crc, piece);
        at += length as u64;
    }
    let mut wanted = [0; CHECKSUM_BYTES as usize];
    file.read_exact_at(&mut wanted, end)?;
    match u64::from_le_bytes(wanted) {
        0 => file.write_all_at(&crc.to_le_bytes(), end),
        wanted if wanted == crc => Ok(()),
        wanted => Err(invalid(format!(
            "its checksum is {crc:016x}, and {wanted:016x} at its end; it was not put in place; fetch it again, and \
             report it if that happens twice"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_is_stale_if_the_primary_says_so_or_if_the_time_does_not_suffice() {
        let summary = |why: &str, headroom_seconds| Summary {
            to: "dump.rdb".into(),
            server: String::new(),
            primary_port: 6379,
            replid: String::new(),
            offset: 1,
            bytes: 1,
            seconds: 0.0,
            not_continued_because: why.to_owned(),
            headroom_seconds,
            backlog_bytes: 1 << 20,
            write_rate: 1000,
        };
        let minute = Duration::from_secs(60);
        assert!(summary("gone", Some(0)).stale(Duration::ZERO).unwrap().contains("gone"));
        assert!(summary("", Some(59)).stale(minute).unwrap().contains("are needed"));
        assert_eq!(summary("", Some(60)).stale(minute), None);
        assert_eq!(summary("", None).stale(minute), None, "nothing is written");
        assert_eq!(summary("", Some(0)).stale(Duration::ZERO), None);
    }

    #[test]
    fn a_file_with_another_checksum_is_found_and_one_without_gets_it() {
        let file = tempfile::tempfile().unwrap();
        let body: Vec<u8> = (0..3_000_000_u32).map(|at| (at * 7) as u8).collect();
        file.write_all_at(&body, 0).unwrap();
        let (right, end) = (crc64(0, &body), body.len() as u64);
        let length = end + CHECKSUM_BYTES;
        for (checksum, is_right) in [(right, true), (right + 1, false), (0, true)] {
            file.write_all_at(&checksum.to_le_bytes(), end).unwrap();
            assert_eq!(check_or_add(&file, length).is_ok(), is_right, "{checksum:x}");
            let mut stored = [0; CHECKSUM_BYTES as usize];
            file.read_exact_at(&mut stored, end).unwrap();
            assert_eq!(u64::from_le_bytes(stored), if is_right { right } else { checksum });
        }
        file.write_all_at(&[!body[0]], 0).unwrap();
        assert!(check_or_add(&file, length).is_err(), "a byte was changed later");
        assert!(check_or_add(&file, 7).is_err());
    }

    #[test]
    fn a_name_that_exists_and_a_second_fetch_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("dump.rdb");
        let first = FileTarget::open(&to, false).unwrap();
        let again = FileTarget::open(&to, false).err().unwrap();
        assert!(again.to_string().contains("another remora fetch"), "{again}");
        drop(first);
        std::fs::write(&to, "there").unwrap();
        let exists = FileTarget::open(&to, false).err().unwrap();
        assert!(exists.to_string().contains("--replace"), "{exists}");
        assert!(FileTarget::open(&to, true).is_ok());
    }
}
