//! `remora fetch`: a source's snapshot as a file in its place, for a server that is started on it, or as a backup.
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
use rustix::fs::Mode;
use serde::Serialize;

use super::arrival::{Keeper, Reached, Stage, Target};
use super::beside::{self, Placing};
use super::mount::{Found, Kept, Shelf};
use super::receiving::{Arrived, Reception, end, outcome};
use crate::args::FetchArgs;
use crate::cluster::nodes_conf;
use crate::exit::{Code, Failure};
use crate::metrics::{Agent, Families, Scrape, Scrapes, Watch, register as all};
use crate::patience::{Patience, RETRY_FOR};
use crate::progress;
use crate::reader::data_set::DataSet;
use crate::reader::spool::{Held, SnapshotId, Spool};
use crate::replica::private::{Claim, Folder};
use crate::server::{Configuration, local, read_configuration};
use crate::signals::Signals;
use crate::tasks::blocking;
use crate::units::{Size, readable};

/// What `--to` says for standard output.
const STDOUT: &str = "-";

/// A file that its owner alone can read, and that replaces another one.
pub(crate) const PRIVATE: Placing = Placing { owner: None, mode: Mode::RUSR.union(Mode::WUSR), replaces: true };

/// Runs `remora fetch`.
///
/// # Errors
/// The file is refused, the source cannot be reached, there is no room, or the primary would not continue from the
/// file.
pub async fn run(args: FetchArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) = Watch::begin(Agent::Fetch, None, args.metrics_file.metrics_file.as_deref()).await?;
    let outcome = fetch(args, &mut scrapes).await;
    watch.end(outcome).await
}

async fn fetch(args: FetchArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if let Some(config) = &args.server_config {
        check_config(config, args.write_nodes_conf.is_some())?;
    }
    if args.sentinel.is_given() && (args.write_replicaof.is_none() || args.to == Path::new(STDOUT)) {
        return Err(Failure::new(Code::Usage, "--sentinel goes with --write-replicaof, and with a file in --to"));
    }
    if args.to == Path::new(STDOUT) {
        if args.write_replicaof.is_some() || args.write_nodes_conf.is_some() {
            let text =
                "--write-replicaof and --write-nodes-conf are for a server that starts on the file: give --to a file";
            return Err(Failure::new(Code::Usage, text));
        }
        return scrapes.meanwhile("the snapshot is being fetched", to_stdout(args)).await;
    }
    let to = args.to.clone();
    let running = blocking(move || Ok(to.parent().and_then(local::process_in)));
    if let Some(process) = running.await? {
        tracing::warn!(
            file = %args.to.display(),
            "{process} runs in the folder of the file, and writes its own data over a file of the name that its setting dbfilename has \
             when it saves or ends: stop it before (SHUTDOWN NOSAVE) if it is to start on this file"
        );
    }
    let fetched = to_file_telling(&args, DataSet::of_a_source(args.from.expected.is_given()), |_| {}, scrapes).await?;
    scrapes.leave(|families| fetched.measure(families));
    fetched.show(&args)
}

/// A fetch that is under way, and the signals that stop it.
struct Fetch {
    signals: Signals,
    reception: Reception,
}

impl Fetch {
    fn start(args: &FetchArgs, target: Arc<dyn Target>, data_set: DataSet) -> Result<Fetch, Failure> {
        let signals = Signals::catch()?;
        let pass_on = (!args.alone).then_some(&args.pass_on);
        Ok(Fetch { signals, reception: Reception::start(&args.from, "fetch", target, true, pass_on, data_set)? })
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

/// Fetches into a file. `data_set`: what the snapshot must be of.
///
/// # Errors
/// As [`run`].
pub(crate) async fn to_file(args: &FetchArgs, data_set: DataSet) -> Result<Summary, Failure> {
    to_file_telling(args, data_set, |_| {}, &mut Scrapes::default()).await
}

/// As [`to_file`]. `begun` is told of the snapshot that has begun to arrive, and of another one if that begins instead.
/// Those who watch are told how far it is.
///
/// # Errors
/// As [`run`].
pub(crate) async fn to_file_telling(
    args: &FetchArgs,
    data_set: DataSet,
    begun: impl Fn(Origin),
    scrapes: &mut Scrapes,
) -> Result<Summary, Failure> {
    match receive(args, data_set, begun, scrapes).await {
        Ok(whole) => whole.place(args).await,
        Err(failure) if failure.code == Code::Stale => Err(failure.and("or use it as a backup with --allow-stale")),
        Err(failure) => Err(failure),
    }
}

/// A snapshot that has arrived beside its place, is right and on the disk, and from which the primary would continue.
pub(crate) struct Whole {
    target: Arc<FileTarget>,
    arrived: Arrived,
    pub(crate) summary: Summary,
}

/// Receives a snapshot up to the point where it can be put in its place.
///
/// # Errors
/// As [`run`].
pub(crate) async fn receive(
    args: &FetchArgs,
    data_set: DataSet,
    begun: impl Fn(Origin),
    scrapes: &mut Scrapes,
) -> Result<Whole, Failure> {
    let began = Instant::now();
    let (to, replaces, beside) = (args.to.clone(), args.replace, args.write_nodes_conf.clone());
    let opened = blocking(move || {
        beside.as_deref().map_or(Ok(()), nodes_conf::refuse_one_in_use)?;
        FileTarget::open(&to, replaces)
    });
    let target = scrapes.meanwhile("what an earlier fetch has left is being checked", opened).await?;
    let target = Arc::new(target);
    let folder = target.folder().to_owned();
    let left = format!("; what has arrived is in {}, and the same command goes on there", folder.display());
    let fetch = Fetch::start(args, Arc::clone(&target) as Arc<dyn Target>, data_set)?;
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
    let summary = Summary::of(args, &arrived, began);
    let whole = Whole { target, arrived, summary };
    if !args.allow_stale {
        whole.refuse_if_stale(args)?;
    }
    Ok(whole)
}

impl Whole {
    /// The file, before it gets its name.
    pub(crate) fn file(&self) -> PathBuf {
        self.target.slots()
    }

    /// The history and the offset of the snapshot.
    pub(crate) fn origin(&self) -> Origin {
        self.arrived.kept.origin()
    }

    /// Refuses a snapshot from which the primary would not continue for long enough, by its backlog alone.
    ///
    /// # Errors
    /// Why not, and where the snapshot is.
    pub(crate) fn refuse_if_stale(&self, args: &FetchArgs) -> Result<(), Failure> {
        let Some(stale) = self.summary.stale(args.need) else { return Ok(()) };
        let text = format!(
            "{}: a server that starts on it would need a full sync: {stale}. It was not put in place, and is {}; raise \
             repl-backlog-size at the primary",
            args.to.display(),
            self.file().display()
        );
        Err(Failure::new(Code::Stale, text))
    }

    /// Puts it in its place.
    ///
    /// # Errors
    /// A file beside it cannot be written, or it cannot be given its owner or its name.
    pub(crate) async fn place(self, args: &FetchArgs) -> Result<Summary, Failure> {
        let Whole { target, arrived, summary } = self;
        let how = Placing { owner: args.owner, mode: args.mode, replaces: args.replace };
        // Before the snapshot: a server that finds it, and is not a replica, would take the data for its own.
        write_who_it_follows(args, &arrived, &summary, how).await?;
        drop(arrived);
        let place = move || match Arc::into_inner(target) {
            Some(target) => target.place(&how),
            None => Err(Failure::local("the slots are still in use; this is a bug of remora, please report it")),
        };
        blocking(place).await?;
        Ok(summary)
    }
}

/// Writes the files by which a server that starts on the snapshot is a replica.
async fn write_who_it_follows(
    args: &FetchArgs,
    arrived: &Arrived,
    summary: &Summary,
    how: Placing,
) -> Result<(), Failure> {
    if let Some(file) = args.write_replicaof.clone() {
        let (host, port) = match args.sentinel.open()? {
            Some(sentinels) => {
                // The snapshot is there: what passes must not throw it away.
                let mut patience = Patience::new(args.from.read.retry_for, RETRY_FOR);
                let primary = loop {
                    match sentinels.primary().await {
                        Ok(primary) => break primary,
                        Err(error) => tokio::time::sleep(patience.after(Instant::now(), error.into())?).await,
                    }
                };
                (primary.host, primary.port)
            }
            None => (primary_host(args, &arrived.plan), summary.primary_port),
        };
        let line = format!("replicaof {host} {port}\n");
        let how = Placing { replaces: true, ..how };
        blocking(move || Ok(beside::write(&file, line.as_bytes(), &how)?)).await?;
    }
    let (Some(file), Some(cluster), Some(at)) = (&args.write_nodes_conf, &args.cluster.cluster, &args.node_address)
    else {
        return Ok(());
    };
    let server = args.cluster.open(cluster)?;
    let mut patience = Patience::new(args.from.read.retry_for, RETRY_FOR);
    let conf = loop {
        match nodes_conf::make(&server, arrived.kept.origin().history, at).await {
            Ok(conf) => break conf,
            Err(failure) => tokio::time::sleep(patience.after(Instant::now(), failure)?).await,
        }
    };
    let to = file.clone();
    blocking(move || {
        nodes_conf::refuse_one_in_use(&to)?;
        write_nodes_conf(&to, &conf, how)
    })
    .await
}

fn write_nodes_conf(to: &Path, conf: &nodes_conf::NodesConf, how: Placing) -> Result<(), Failure> {
    match read_configuration(to) {
        // The node has been in the cluster before, and keeps its name there.
        Ok(text) if nodes_conf::follows(&text, &conf.primary) => Ok(()),
        Ok(_) if !how.replaces => Err(Failure::refused(format!(
            "{} is of a node that does not follow {}: remove it, or replace it by --replace",
            to.display(),
            conf.primary
        ))),
        Err(error) if error.kind() != io::ErrorKind::NotFound && !how.replaces => Err(unreadable(to, &error)),
        _ => Ok(beside::write(to, conf.text.as_bytes(), &Placing { replaces: true, ..how })?),
    }
}

async fn to_stdout(args: FetchArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let shelf = Arc::new(Shelf::new(&args.spool));
    let mut fetch = Fetch::start(
        &args,
        Arc::clone(&shelf) as Arc<dyn Target>,
        DataSet::of_a_source(args.from.expected.is_given()),
    )?;
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
                    (Ok(_), Some(arrived)) => return Summary::of(&args, &arrived, began).show(&args),
                    // All of it has been written, and the source is just being asked about the primary.
                    (Ok(_), None) => {
                        let arrived = fetch.arrived("", || {}, &mut Scrapes::default(), |_| {}).await?;
                        return Summary::of(&args, &arrived, began).show(&args);
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

fn unwritable(file: &Path, error: &io::Error) -> Failure {
    Failure::local(format!("{} cannot be written: {error}", file.display()))
}

/// The host at which a server on this host reaches the primary.
fn primary_host(args: &FetchArgs, plan: &Offer) -> String {
    if plan.primary.host.is_empty() { args.from.read.source.present().host.clone() } else { plan.primary.host.clone() }
}

fn unreadable(file: &Path, error: &io::Error) -> Failure {
    Failure::refused(format!("{} cannot be read: {error}", file.display()))
}

/// Refuses a server that would not load the file.
fn check_config(file: &Path, has_nodes_conf: bool) -> Result<(), Failure> {
    let configuration = Configuration::read(file).map_err(|error| unreadable(file, &error))?;
    let file = file.display();
    if configuration.is_yes("appendonly") {
        return Err(Failure::refused(format!(
            "{file} has appendonly yes: the server would load its AOF, or nothing, and not an RDB file. Start it with \
             appendonly no, and set it to yes by CONFIG SET when it follows its primary"
        )));
    }
    let is_cluster = configuration.is_yes("cluster-enabled");
    if is_cluster && !has_nodes_conf {
        tracing::warn!(
            "{file} has cluster-enabled yes: without a nodes.conf that names its primary, the node would take the slots \
             of its keys for its own; --write-nodes-conf writes one"
        );
    }
    if configuration.primary().is_none() && !is_cluster {
        tracing::warn!(
            "{file} has no replicaof: a server that is no replica while it loads the file takes a full sync when it \
             becomes one; include the file of --write-replicaof there"
        );
    }
    Ok(())
}

/// What was fetched.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    to: PathBuf,
    pub(crate) server: String,
    primary_port: u16,
    pub(crate) replid: String,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
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
    fn of(args: &FetchArgs, arrived: &Arrived, began: Instant) -> Summary {
        let Origin { history, offset, .. } = arrived.kept.origin();
        let plan = &arrived.plan;
        let behind = plan.offset.saturating_sub(offset);
        let room = plan.backlog_bytes.saturating_sub(behind);
        let covered = arrived.covered.clone().unwrap_or_else(|| Err("the primary was not asked".to_owned()));
        Summary {
            to: args.to.clone(),
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

    /// Adds what is known at the end.
    fn measure(&self, families: &mut Families) {
        families.number(&all::FETCH_BYTES, self.bytes);
        families.number(&all::FETCH_OFFSET, self.offset);
        if let Some(seconds) = self.headroom_seconds {
            families.number(&all::FETCH_HEADROOM, seconds);
        }
    }

    fn show(&self, args: &FetchArgs) -> Result<(), Failure> {
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
        if let Some(file) = &args.json {
            let json = serde_json::to_vec_pretty(self).map_err(|error| Failure::local(error.to_string()))?;
            std::fs::write(file, json).map_err(|error| unwritable(file, &error))?;
        }
        Ok(())
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
pub(super) fn write_out(kept: &Arc<Kept>, out: &mut impl Write) -> io::Result<u64> {
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
pub(super) struct FileTarget {
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
    pub(super) fn open(to: &Path, replaces: bool) -> Result<FileTarget, Failure> {
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
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The slots, which become the file.
    pub(super) fn slots(&self) -> PathBuf {
        self.folder.join("slots")
    }

    /// Puts the file in its place, with its name on the disk, and removes the folder.
    ///
    /// # Errors
    /// The owner or the name cannot be given to it, or another file has the name by now.
    pub(super) fn place(self, how: &Placing) -> Result<(), Failure> {
        let slots = self.slots();
        let opened = File::open(&slots);
        let file = opened
            .map_err(|error| Failure::local(format!("{}: its slots cannot be opened: {error}", self.to.display())))?;
        beside::put(&file, &slots, &self.to, how)?;
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
    fn a_server_with_an_aof_is_refused_and_other_settings_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("redis.conf");
        for (text, is_refused) in [
            ("appendonly yes\n", true),
            ("appendonly no\nAppendOnly \"yes\"\n", true),
            ("appendonly yes\nappendonly no\n", false),
            ("# appendonly yes\nreplicaof a 1\n", false),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(check_config(&file, false).is_err(), is_refused, "{text}");
        }
        assert!(check_config(&folder.path().join("missing"), false).is_err());
        assert!(check_config(Path::new("/dev/zero"), false).is_err(), "without an end");
    }

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
