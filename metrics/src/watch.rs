//! Watch: those who watch an agent: the site, and the file that is written now and then and at the end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_base::files::{self, Placing};
use remora_protocol::StatusReport;
use rustix::fs::Mode;
use tokio::sync::{mpsc, oneshot};

use super::families::{self, Families, Form};
use super::register::{Agent, RUN_ENDED, RUN_EXIT_CODE, RUN_STARTED};
use super::site::{ANSWER_LIMIT, Answer, CONNECTIONS, Site, bind};
use remora_process::exit::Failure;
use remora_process::{AbortOnDrop, blocking};

/// How often the file is written while the agent runs: as often as Prometheus asks node_exporter by default.
const FILE_EVERY: Duration = Duration::from_secs(15);

/// The file's permissions: node_exporter runs as another user. It names servers, and holds no data.
const READABLE: Placing =
    Placing { owner: None, mode: Mode::RUSR.union(Mode::WUSR).union(Mode::RGRP).union(Mode::ROTH), replaces: true };

/// A question for the agent's values. Each part of the agent adds its own, and the last one answers.
#[derive(Debug)]
pub struct Scrape {
    /// What is known so far.
    pub families: Families,
    /// What a source adds for the page.
    pub report: Option<Box<StatusReport>>,
    to: oneshot::Sender<Answer>,
}

impl Scrape {
    /// A question, and where the answer arrives.
    pub fn of(agent: Agent) -> (Scrape, oneshot::Receiver<Answer>) {
        let mut families = Families::new(agent);
        families::show(&mut families);
        Scrape::with(families)
    }

    fn with(families: Families) -> (Scrape, oneshot::Receiver<Answer>) {
        let (to, told) = oneshot::channel();
        (Scrape { families, report: None, to }, told)
    }

    /// Answers. `not_ready`: why the agent cannot do its work now.
    pub fn answer(self, not_ready: Option<String>) {
        let answer = Answer { families: self.families, report: self.report, not_ready };
        let _ = self.to.send(answer); // a client that has gone needs no answer
    }
}

/// What is added to every answer.
type Always = Box<dyn Fn(&mut Families) + Send>;

/// The questions of those who watch, for the agent's loop.
#[derive(Default)]
pub struct Scrapes {
    asked: Option<mpsc::Receiver<Scrape>>,
    always: Option<Always>,
    file: Option<Arc<File>>,
}

impl Scrapes {
    /// For a part of an agent, to which another part passes some on.
    pub fn passed_on() -> (mpsc::Sender<Scrape>, Scrapes) {
        let (tell, asked) = mpsc::channel(CONNECTIONS);
        (tell, Scrapes { asked: Some(asked), ..Scrapes::default() })
    }

    /// The next question. Pending for ever if nothing asks. Cancel-safe.
    pub async fn next(&mut self) -> Scrape {
        let next = match &mut self.asked {
            Some(asked) => asked.recv().await,
            None => None,
        };
        let Some(mut scrape) = next else { return std::future::pending().await };
        self.add(&mut scrape.families);
        scrape
    }

    /// Adds this to every answer from now on.
    pub fn always(&mut self, show: impl Fn(&mut Families) + Send + 'static) {
        self.always = Some(Box::new(show));
    }

    fn add(&self, families: &mut Families) {
        if let Some(always) = &self.always {
            always(families);
        }
    }

    /// Does this, and answers meanwhile that the agent is not ready for this reason.
    pub async fn meanwhile<T>(&mut self, why: &str, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                scrape = self.next() => scrape.answer(Some(why.to_owned())),
            }
        }
    }

    /// Leaves the last values for the file.
    pub fn leave(&self, show: impl FnOnce(&mut Families)) {
        let Some(file) = &self.file else { return };
        let mut families = file.families();
        self.add(&mut families);
        show(&mut families);
        *file.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(families);
    }
}

/// What an agent is watched by. Dropping it ends the site.
pub struct Watch {
    file: Option<Arc<File>>,
    _site: Option<Site>,
    _writing: Option<AbortOnDrop>,
}

impl Watch {
    /// Opens the port at this address, and looks whether the file can be written. Neither is given: nothing is done.
    ///
    /// # Errors
    /// The address cannot be bound, or no file can be made in the folder.
    pub async fn begin(
        agent: Agent,
        address: Option<SocketAddr>,
        file: Option<&Path>,
    ) -> Result<(Watch, Scrapes), Failure> {
        let file = match file {
            Some(path) => Some(Arc::new(File::open(agent, path.to_owned()).await?)),
            None => None,
        };
        if address.is_none() && file.is_none() {
            return Ok((Watch { file: None, _site: None, _writing: None }, Scrapes::default()));
        }
        let (ask, asked) = mpsc::channel(CONNECTIONS);
        let site = match address {
            Some(address) => {
                let (listener, ask) = (bind(address).await?, ask.clone());
                Some(Site::serve(listener, move || {
                    let ask = ask.clone();
                    async move {
                        let (scrape, told) = Scrape::of(agent);
                        ask.send(scrape).await.ok()?;
                        told.await.ok()
                    }
                }))
            }
            None => None,
        };
        let writing = file.clone().map(|file| AbortOnDrop::new(&tokio::spawn(write_now_and_then(file, ask))));
        let scrapes = Scrapes { asked: Some(asked), always: None, file: file.clone() };
        Ok((Watch { file, _site: site, _writing: writing }, scrapes))
    }

    /// Writes the last values, and how the command has ended.
    ///
    /// # Errors
    /// Those of the outcome, or the file cannot be written.
    pub async fn end(self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let Some(file) = self.file else { return outcome };
        let last = file.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut families = last.unwrap_or_else(|| file.families());
        families.gauge(&RUN_ENDED, since_1970(SystemTime::now()));
        let code = outcome.as_ref().err().map_or(0, |failure| failure.code.number());
        families.number(&RUN_EXIT_CODE, code.into());
        let written = blocking(move || file.write(&families, true)).await;
        match (outcome, written) {
            (Ok(()), Err(failure)) => Err(failure.and("the work itself is done")),
            (Err(failure), Err(unwritten)) => {
                tracing::warn!("{unwritten}");
                Err(failure)
            }
            (outcome, Ok(())) => outcome,
        }
    }
}

fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The file.
struct File {
    agent: Agent,
    path: PathBuf,
    /// Its name without its ending: the label by which several files of one folder differ.
    run: String,
    started: SystemTime,
    last: Mutex<Option<Families>>,
    /// Whether the last values are in it. Held while it is written, so that older ones never replace newer ones.
    is_ended: Mutex<bool>,
}

impl File {
    async fn open(agent: Agent, path: PathBuf) -> Result<File, Failure> {
        let run = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let started = SystemTime::now();
        let file = File { agent, path, run, started, last: Mutex::default(), is_ended: Mutex::default() };
        // Found before the work, and not after it. What an earlier run has written stays until this one has values.
        blocking(move || {
            let folder = file.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let made = tempfile::Builder::new().prefix(".remora").tempfile_in(folder.unwrap_or(Path::new(".")));
            made.map_err(|error| {
                Failure::local(format!(
                    "{} cannot be written: {error}; name another file by --metrics-file",
                    file.path.display()
                ))
            })?;
            Ok(file)
        })
        .await
    }

    fn families(&self) -> Families {
        let mut families = Families::of_file(self.agent, &self.run);
        families.gauge(&RUN_STARTED, since_1970(self.started));
        families
    }

    fn write(&self, families: &Families, ends: bool) -> Result<(), Failure> {
        let mut is_ended = self.is_ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_ended {
            return Ok(());
        }
        *is_ended = ends;
        Ok(files::write(&self.path, families.text(Form::Classic).as_bytes(), &READABLE)?)
    }
}

async fn write_now_and_then(file: Arc<File>, ask: mpsc::Sender<Scrape>) {
    let mut is_told = false;
    loop {
        tokio::time::sleep(FILE_EVERY).await;
        let (scrape, told) = Scrape::with(file.families());
        let asked = async {
            ask.send(scrape).await.ok()?;
            told.await.ok()
        };
        let Some(answer) = tokio::time::timeout(ANSWER_LIMIT, asked).await.ok().flatten() else { continue };
        let to = Arc::clone(&file);
        let written = blocking(move || to.write(&answer.families, false)).await;
        if let Err(failure) = &written
            && !is_told
        {
            tracing::warn!("{failure}");
        }
        is_told = written.is_err();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::super::register::SYNC_READERS;
    use super::*;
    use remora_process::exit::Code;

    async fn watch(file: &Path) -> Result<(Watch, Scrapes), Failure> {
        Watch::begin(Agent::Replica, None, Some(file)).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_file_is_written_while_the_agent_runs_and_at_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.prom");
        let (watch, mut scrapes) = watch(&path).await.unwrap();
        assert!(!path.exists(), "nothing is known yet");
        scrapes.always(|families| families.number(&SYNC_READERS, 5));
        scrapes.next().await.answer(None);
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("remora_sync_readers{run=\"one\"} 5.0") && !text.contains("exit_code"), "{text}");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        scrapes.leave(|_| {});
        let ended = watch.end(Err(Failure::new(Code::Source, "gone"))).await;
        assert_eq!(ended.unwrap_err().code, Code::Source);
        let text = std::fs::read_to_string(&path).unwrap();
        for line in
            ["remora_run_exit_code{run=\"one\"} 5.0", "remora_run_ended_timestamp_seconds{run=\"one\"} ", "readers"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[tokio::test]
    async fn a_folder_that_is_missing_is_found_before_the_work() {
        let failure = watch(Path::new("/nowhere/one.prom")).await.map(|_| ()).unwrap_err();
        assert!(failure.code == Code::Local && failure.message.contains("--metrics-file"), "{failure}");
    }

    #[tokio::test]
    async fn without_those_who_watch_nothing_is_asked_and_nothing_written() {
        let none = Watch::begin(Agent::Replica, None, None).await;
        let (watch, mut scrapes) = none.unwrap();
        assert_eq!(scrapes.meanwhile("busy", async { 7 }).await, 7);
        scrapes.leave(|_| unreachable!("there is no file"));
        watch.end(Ok(())).await.unwrap();
    }
}
