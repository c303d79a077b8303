//! Site: the HTTP server of the metrics, how it asks the agent, and the file that is written for agents that end.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use remora_base::files::{self, Placing};
use remora_process::exit::Failure;
use remora_process::{AbortOnDrop, blocking};
use remora_protocol::StatusReport;
use rustix::fs::Mode;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

use super::families::{self, Families, Form};
use super::page;
use super::register::{Agent, RUN_ENDED, RUN_EXIT_CODE, RUN_STARTED};

/// What an agent says to those who watch.
#[derive(Debug)]
pub struct Answer {
    /// What is known of the agent.
    pub families: Families,
    /// What a source holds and which replicas read from it, for the page.
    pub report: Option<Box<StatusReport>>,
    /// Why the agent cannot do its work now.
    pub not_ready: Option<String>,
}

/// Asks the agent. `None` if it does not answer.
type Ask = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Option<Answer>> + Send>> + Send + Sync>;

/// A site that is served until it is dropped.
pub struct Site {
    _task: AbortOnDrop,
}

/// Connections that are served at once. Prometheus opens one, and a probe another.
pub(super) const CONNECTIONS: usize = 16;

/// How long a client may take for its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// How long a connection may last: a request, an answer, and a slow network.
const CONNECTION_LIMIT: Duration = Duration::from_secs(30);

/// How long the agent may take to answer: Prometheus waits for ten seconds, and a probe of Kubernetes for one.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How long a connection is left alone that has sent its request, if others wait for its place: to answer may take half
/// of it, and to read the answer the other half.
const ANSWERED_LIMIT: Duration = Duration::from_secs(10);

/// The pause after the system has refused a connection, for example because too many files are open.
const PAUSE: Duration = Duration::from_millis(100);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
const JSON: &str = "application/json";
const PLAIN: &str = "text/plain; charset=utf-8";

/// Binds the port.
///
/// # Errors
/// The address cannot be bound.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        Failure::local(format!("no metrics at {address}: {error}; set another address with --metrics"))
    })
}

impl Site {
    /// Serves what `ask` answers.
    pub fn serve<F>(listener: TcpListener, ask: impl Fn() -> F + Send + Sync + 'static) -> Site
    where
        F: Future<Output = Option<Answer>> + Send + 'static,
    {
        let ask: Ask = Arc::new(move || Box::pin(ask()));
        let task = tokio::spawn(async move {
            let mut places = Places::default();
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let (ask, is_heard) = (Arc::clone(&ask), Arc::new(AtomicBool::new(false)));
                        let place = places.free().await;
                        let conversation = converse(stream, ask, Arc::clone(&is_heard));
                        let task = tokio::spawn(async move {
                            let _ = tokio::time::timeout(CONNECTION_LIMIT, conversation).await;
                            drop(place);
                        });
                        places.taken(task.abort_handle(), is_heard);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection for metrics was not accepted");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        Site { _task: AbortOnDrop::new(&task) }
    }
}

/// The places of connections. One that has not sent its request gives way to the next client: a probe must not wait
/// behind clients that say nothing.
struct Places {
    free: Arc<Semaphore>,
    /// Those that are taken, the oldest first, and some that have ended.
    open: VecDeque<Open>,
}

/// A connection.
struct Open {
    task: AbortHandle,
    since: Instant,
    /// Its request has arrived.
    is_heard: Arc<AtomicBool>,
}

impl Default for Places {
    fn default() -> Places {
        Places { free: Arc::new(Semaphore::new(CONNECTIONS)), open: VecDeque::new() }
    }
}

impl Places {
    /// Waits for a free place. If all are taken, it ends the oldest connection that has sent no request. If each has
    /// sent one, it waits until a connection ends, and further clients wait in the kernel's queue.
    async fn free(&mut self) -> OwnedSemaphorePermit {
        self.open.retain(|open| !open.task.is_finished());
        if let Ok(place) = Arc::clone(&self.free).try_acquire_owned() {
            return place;
        }
        let gives_way = |open: &Open| !open.is_heard.load(Relaxed) || open.since.elapsed() > ANSWERED_LIMIT;
        if let Some(open) = self.open.iter().position(gives_way).and_then(|oldest| self.open.remove(oldest)) {
            open.task.abort();
        }
        match Arc::clone(&self.free).acquire_owned().await {
            Ok(place) => place,
            Err(_) => std::future::pending().await, // it is never closed
        }
    }

    fn taken(&mut self, task: AbortHandle, is_heard: Arc<AtomicBool>) {
        self.open.push_back(Open { task, since: Instant::now(), is_heard });
    }
}

async fn converse(stream: TcpStream, ask: Ask, is_heard: Arc<AtomicBool>) {
    let service = service_fn(move |request| {
        is_heard.store(true, Relaxed);
        answer(request, Arc::clone(&ask))
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_LIMIT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a request for metrics");
    }
}

async fn answer(request: Request<Incoming>, ask: Ask) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/") => return Ok(page::document()),
        (&Method::GET | &Method::HEAD, path @ ("/metrics" | "/healthz" | "/readyz" | page::STATUS)) => {
            let asked = tokio::time::timeout(ANSWER_LIMIT, ask()).await.ok().flatten();
            match (path, asked) {
                (_, None) => (StatusCode::SERVICE_UNAVAILABLE, PLAIN, "the agent does not answer\n".to_owned()),
                ("/metrics", Some(answer)) => {
                    let (form, kind) = form(request.headers());
                    (StatusCode::OK, kind, answer.families.text(form))
                }
                (page::STATUS, Some(Answer { families, report, not_ready })) => {
                    (StatusCode::OK, JSON, page::status(&families, report.as_deref(), not_ready.as_deref()))
                }
                ("/readyz", Some(Answer { not_ready: Some(why), .. })) => {
                    (StatusCode::SERVICE_UNAVAILABLE, PLAIN, format!("{why}\n"))
                }
                _ => (StatusCode::OK, PLAIN, "ok\n".to_owned()),
            }
        }
        (&Method::GET | &Method::HEAD, _) => {
            (StatusCode::NOT_FOUND, PLAIN, "there are /, /metrics, /healthz and /readyz\n".to_owned())
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, PLAIN, "only GET and HEAD\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    // A browser must take no answer for a page of another kind, and keep none.
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// The form that the client understands: OpenMetrics, unless it asks for another kind of text alone.
fn form(headers: &HeaderMap) -> (Form, &'static str) {
    let accepts = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match accepts.contains("text/plain") && !accepts.contains("application/openmetrics-text") {
        true => (Form::Classic, CLASSIC),
        false => (Form::OpenMetrics, OPENMETRICS),
    }
}

// Those who watch an agent: the site, and the file that is written now and then and at the end.

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

    use remora_process::exit::Code;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::register::{Agent, SYNC_READERS};
    use super::*;

    async fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    async fn site(answer: impl Fn() -> Option<Answer> + Send + Sync + 'static) -> (Site, SocketAddr) {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        (Site::serve(listener, move || std::future::ready(answer())), address)
    }

    fn answer(not_ready: Option<&str>) -> Option<Answer> {
        Some(Answer { families: Families::new(Agent::Source), report: None, not_ready: not_ready.map(Into::into) })
    }

    #[tokio::test]
    async fn each_path_has_its_answer() {
        let (_site, ready) = site(|| answer(None)).await;
        let (_other, waiting) = site(|| answer(Some("the server is gone"))).await;
        let (_silent, silent) = site(|| None).await;
        for (at, path, status, text) in [
            (ready, "/metrics", 200, "# EOF"),
            (ready, "/readyz", 200, "ok"),
            (waiting, "/readyz", 503, "the server is gone"),
            (waiting, "/healthz", 200, "ok"),
            (waiting, "/metrics", 200, "# EOF"),
            (silent, "/healthz", 503, "does not answer"),
            (ready, "/", 200, "<!doctype html>"),
            (silent, "/", 200, "<!doctype html>"),
            (ready, "/status.json", 200, "\"agent\":\"source\""),
            (waiting, "/status.json", 200, "the server is gone"),
            (silent, "/status.json", 503, "does not answer"),
            (ready, "/other", 404, "/metrics"),
        ] {
            let said = get(at, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
            assert!(said.starts_with(&format!("HTTP/1.1 {status} ")) && said.contains(text), "{path}: {said}");
        }
        let said = get(ready, "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n").await;
        assert!(said.starts_with("HTTP/1.1 405 "), "{said}");
    }

    #[tokio::test]
    async fn a_client_gets_the_form_that_it_understands() {
        let (_site, address) = site(|| answer(None)).await;
        for (accepts, kind, is_classic) in [
            ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPENMETRICS, false),
            ("*/*", OPENMETRICS, false),
            ("text/plain;version=0.0.4", CLASSIC, true),
        ] {
            let said = get(address, &format!("GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: {accepts}\r\n\r\n")).await;
            assert!(said.contains(&format!("content-type: {kind}\r\n")), "{accepts}: {said}");
            assert_eq!(!said.contains("# EOF"), is_classic, "{accepts}: {said}");
        }
    }

    #[tokio::test]
    async fn half_requests_give_way_to_a_probe_and_a_client_that_is_answered_does_not() {
        let (_site, address) = site(|| answer(None)).await;
        let half = async |text: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(text.as_bytes()).await.unwrap();
            stream
        };
        for beginning in ["", "GET /metrics HTTP/1.1\r\nHo"] {
            let mut held = Vec::new();
            for _ in 0..3 * CONNECTIONS {
                held.push(half(beginning).await);
            }
            for _ in 0..3 {
                assert!(get(address, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("ok"));
            }
            // The probes took the oldest places: the last one, which has waited for nothing, is there still.
            let mut last = held.pop().unwrap();
            let rest = if beginning.is_empty() { "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" } else { "st: a\r\n\r\n" };
            last.write_all(rest.as_bytes()).await.unwrap();
            let mut text = String::new();
            last.read_to_string(&mut text).await.unwrap();
            assert!(text.contains("# EOF"), "{text}");
        }
    }

    #[tokio::test]
    async fn what_is_not_http_ends_the_connection_and_nothing_else() {
        let (_site, address) = site(|| answer(None)).await;
        for request in ["\0\0\0\0\r\n\r\n", "GET\r\n\r\n", &format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20))] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(request.as_bytes()).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        assert!(get(address, "GET /healthz HTTP/1.0\r\n\r\n").await.contains("ok"));
    }

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
