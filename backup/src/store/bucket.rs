//! A bucket of an S3-compatible store.
//!
//! A long object is sent in parts, a few at a time, and is there once all of them are. Before the first part, a note of
//! the upload is stored: parts of an upload that was not completed are invisible and cost money, and the store does not
//! list them to every client. The next run finds the note, and breaks that upload off.
//!
//! ```text
//!   begin ──▶ .remora-uploads/5f1c… ──▶ part, part, part ──▶ complete ──▶ the note is removed
//! ```

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::stream::{self, BoxStream, StreamExt};
use http_body_util::BodyExt;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    ClientOptions, MultipartId, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig, StaticCredentialProvider,
};
use remora_redis::rdb::crc64;
use remora_wire::token;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Object, Store, Upload};
use crate::options::{Location, StoreOptions};
use remora_process::events;
use remora_process::exit::{Code, Failure};

/// Bytes of a part at least. Stores want 5 MiB and more, and Amazon charges by the request.
const PART_BYTES: u64 = 8 << 20;

/// Parts of an object at most: stores take 10,000, and the estimate of its length may be a little short.
const PARTS: u64 = 9_000;

/// Parts on their way at once: on a link with a long delay one does not fill it. Each takes its bytes of memory.
const AT_ONCE: usize = 4;

/// How often the role of this machine is asked for: some twenty seconds. A machine that has none would be asked for all
/// of `--retry-for`.
const ROLE_RETRIES: usize = 20;

/// The host that gives a machine the keys of its role.
const ROLE_ADDRESS: &str = "169.254.";

/// How the client begins its sentence about a store that sends it elsewhere.
const OTHER_REGION: &str = "Received redirect without LOCATION";

/// More tries than `--retry-for` has time for: pauses grow to 15 s.
const WAITING_RETRIES: usize = 100_000;

/// How long the next bytes of an object that is read may take.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// Where the notes of uploads are.
const UPLOADS: &str = ".remora-uploads";

/// A bucket, and what its keys begin with.
#[derive(Debug)]
pub(super) struct BucketStore {
    inner: Arc<Inner>,
}

struct Inner {
    s3: Arc<AmazonS3>,
    at: Location,
    prefix: String,
    runtime: Handle,
    /// How long a request is tried.
    retry_for: Duration,
    /// Whether the keys are those of the machine's role.
    is_role: bool,
    /// Whether requests end.
    stop: watch::Sender<bool>,
}

/// The note of an upload.
#[derive(Serialize, Deserialize)]
struct Note {
    key: String,
    upload: MultipartId,
}

impl BucketStore {
    /// Prepares requests, which are tried again for so long while the store cannot be reached or is busy. It sends
    /// none. Only in a runtime.
    ///
    /// # Errors
    /// The keys cannot be read, or the address of the store is not usable.
    pub(super) fn open(
        bucket: &str,
        prefix: &str,
        options: &StoreOptions,
        retry_for: Duration,
    ) -> Result<BucketStore, Failure> {
        let at = Location::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_http_connector(Connector)
            // Not every store has it, and few objects are removed.
            .with_disable_bulk_delete(true);
        if let Some(endpoint) = &options.endpoint {
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &options.region {
            builder = builder.with_region(region);
        }
        let set = |key| builder.get_config_value(&key).filter(|value| !value.is_empty());
        if let Some(endpoint) = set(AmazonS3ConfigKey::S3Endpoint).or_else(|| set(AmazonS3ConfigKey::Endpoint)) {
            check_endpoint(&endpoint, options.allow_http)?;
        }
        let has_others = [
            AmazonS3ConfigKey::AccessKeyId,
            AmazonS3ConfigKey::WebIdentityTokenFile,
            AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
            AmazonS3ConfigKey::ContainerCredentialsFullUri,
        ];
        let has_others = has_others.into_iter().any(|key| set(key).is_some());
        let file = options.credentials_file.clone().or_else(|| usual_file().filter(|_| !has_others));
        let is_role = file.is_none() && !has_others;
        let max_retries = if is_role { ROLE_RETRIES } else { WAITING_RETRIES };
        builder = builder.with_retry(RetryConfig { max_retries, retry_timeout: retry_for, ..RetryConfig::default() });
        match file {
            Some(file) => {
                let keys = read(&file)?;
                builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(keys)));
            }
            None if is_role => tracing::info!("no keys for {at} are given: the role of this machine is asked for"),
            None => {}
        }
        let built = builder.with_allow_http(true).build();
        let s3 = built.map_err(|error| Failure::refused(format!("{at} cannot be used: {error}")))?;
        let (prefix, stop) = (prefix.to_owned(), watch::Sender::new(false));
        let inner = Inner { s3: Arc::new(s3), at, prefix, runtime: Handle::current(), retry_for, is_role, stop };
        Ok(BucketStore { inner: Arc::new(inner) })
    }
}

/// Refuses an address that is not one, or that sends everything in clear to another host.
fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<(), Failure> {
    let unusable = |what: &str| {
        let text = format!("--s3-endpoint (or AWS_ENDPOINT_URL) {endpoint}: {what}");
        Err(Failure::refused(text))
    };
    let Ok(address) = endpoint.parse::<hyper::Uri>() else { return unusable("write https://HOST:PORT") };
    let Some(host) = address.host() else { return unusable("write https://HOST:PORT") };
    let host = host.trim_matches(['[', ']']);
    let is_local = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    match address.scheme_str() {
        Some("https") => Ok(()),
        Some("http") if is_local || allow_http => Ok(()),
        Some("http") => unusable("data would cross the network in clear; write https://, or add --s3-allow-http"),
        _ => unusable("write https://HOST:PORT"),
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inner({})", self.at)
    }
}

impl Inner {
    fn key(&self, key: &str) -> String {
        [&*self.prefix, key].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/")
    }

    fn path(&self, key: &str) -> Result<Path, Failure> {
        let parsed = Path::parse(self.key(key));
        parsed.map_err(|error| Failure::refused(format!("{} is not a key of objects: {error}", self.address(key))))
    }

    fn address(&self, key: &str) -> String {
        if key.is_empty() { self.at.to_string() } else { format!("{}/{key}", self.at) }
    }

    fn failed(&self, key: &str, error: &object_store::Error) -> Failure {
        Failure::new(Code::Store, format!("{}: {}", self.address(key), self.cause(error)))
    }

    /// What has failed, and what to do. The client's own sentences name its types and its settings.
    fn cause(&self, error: &object_store::Error) -> String {
        use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
        let text = error.to_string();
        if self.is_role && text.contains(ROLE_ADDRESS) {
            return "no keys are given, and this machine has no role that gives some: name a file of keys by \
                --s3-credentials-file, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                .to_owned();
        }
        let said = answer(&text).map(|said| format!(" ({said})")).unwrap_or_default();
        match error {
            NotFound { .. } => {
                format!("the bucket or the object does not exist{said}: check the address, and --s3-endpoint")
            }
            PermissionDenied { .. } | Unauthenticated { .. } => format!(
                "the store does not accept the keys for this request{said}: check --s3-credentials-file (or \
                AWS_ACCESS_KEY_ID), and what these keys may do in the bucket"
            ),
            _ if text.contains(OTHER_REGION) => "the bucket is in another region: name it by --s3-region".to_owned(),
            _ => match http_error(error) {
                Some((HttpErrorKind::Connect, cause)) => format!(
                    "the store cannot be reached: {cause}; tried for {} s (--retry-for): check --s3-endpoint, and that the \
                    store runs",
                    self.retry_for.as_secs()
                ),
                Some((HttpErrorKind::Timeout, _)) => format!(
                    "the store did not answer within {} s; tried for {} s (--retry-for)",
                    ANSWER_LIMIT.as_secs(),
                    self.retry_for.as_secs()
                ),
                Some((_, cause)) => format!(
                    "the connection to the store broke: {cause}; tried for {} s (--retry-for)",
                    self.retry_for.as_secs()
                ),
                None => match answer(&text) {
                    Some(said) => format!("the store refuses the request: {said}"),
                    None => text,
                },
            },
        }
    }

    /// Waits for a request. Its tries and its pauses are bounded.
    fn wait<T>(&self, key: &str, request: impl Future<Output = object_store::Result<T>>) -> Result<T, Failure> {
        self.unless_stopped(key, request)?.map_err(|error| self.failed(key, &error))
    }

    /// Waits for something, or until requests end.
    fn unless_stopped<T>(&self, key: &str, work: impl Future<Output = T>) -> Result<T, Failure> {
        let mut stop = self.stop.subscribe();
        self.runtime.block_on(async {
            tokio::select! {
                done = work => Ok(done),
                _ = stop.wait_for(|stop| *stop) => {
                    Err(Failure::new(Code::Interrupted, format!("{}: stopped", self.address(key))))
                }
            }
        })
    }

    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), Failure> {
        let path = self.path(key)?;
        self.wait(key, self.s3.put(&path, PutPayload::from(bytes))).map(|_| ())
    }

    fn remove(&self, keys: &[String]) -> Result<(), Failure> {
        let paths: Vec<_> = keys.iter().map(|key| self.path(key)).collect::<Result<_, _>>()?;
        let paths = stream::iter(paths.into_iter().map(Ok)).boxed();
        let removed = self.runtime.block_on(async { self.s3.delete_stream(paths).collect::<Vec<_>>().await });
        match removed
            .into_iter()
            .find_map(|removed| removed.err().filter(|error| !matches!(error, object_store::Error::NotFound { .. })))
        {
            Some(error) => Err(self.failed("", &error)),
            None => Ok(()),
        }
    }

    /// Breaks an upload off. One that is over is no error.
    fn abort(&self, key: &str, upload: &MultipartId) -> Result<(), Failure> {
        let path = self.path(key)?;
        match self.runtime.block_on(self.s3.abort_multipart(&path, upload)) {
            Err(object_store::Error::NotFound { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(self.failed(key, &error)),
        }
    }
}

/// What a store says in its answer, which is XML: its code, and its sentence.
fn answer(text: &str) -> Option<String> {
    let field = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0.trim().to_owned())
    };
    match (field("Code")?, field("Message")) {
        (code, Some(message)) if !message.is_empty() => Some(format!("{code}: {}", message.trim_end_matches('.'))),
        (code, _) => Some(code),
    }
}

/// The kind of an error of the connection, and its cause.
fn http_error(error: &object_store::Error) -> Option<(HttpErrorKind, String)> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return Some((http.kind(), cause_of(http)));
        }
        cause = error.source();
    }
    None
}

/// Without the words that hyper puts before each cause.
fn cause_of(error: &HttpError) -> String {
    let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let before = ["client error (Connect): ", "client error (SendRequest): ", "tcp connect error: "];
    before.iter().fold(&*text, |text, words| text.strip_prefix(words).unwrap_or(text)).to_owned()
}

impl Store for BucketStore {
    fn address(&self, key: &str) -> String {
        self.inner.address(key)
    }

    fn list(&self, under: &str) -> Result<Vec<Object>, Failure> {
        let path = self.inner.path(under)?;
        let whole = Some(&path).filter(|path| !path.as_ref().is_empty());
        let listed = self.inner.wait(under, self.inner.s3.list_with_delimiter(whole))?;
        let prefix = match &*self.inner.prefix {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        let object = |found: object_store::ObjectMeta| {
            let key = found.location.as_ref().strip_prefix(&*prefix)?.to_owned();
            Some(Object { key, bytes: found.size })
        };
        let mut all: Vec<Object> = listed.objects.into_iter().filter_map(object).collect();
        all.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(all)
    }

    fn read(&self, key: &str) -> Result<Option<Box<dyn Read + Send>>, Failure> {
        let path = self.inner.path(key)?;
        match self.inner.unless_stopped(key, self.inner.s3.get(&path))? {
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.inner.failed(key, &error)),
            Ok(found) => {
                let (inner, address) = (Arc::clone(&self.inner), self.inner.address(key));
                Ok(Some(Box::new(Reading { inner, address, pieces: found.into_stream(), piece: Bytes::new() })))
            }
        }
    }

    fn upload(&self, key: &str, about: u64) -> Result<Box<dyn Upload>, Failure> {
        let part_bytes = about.div_ceil(PARTS).next_multiple_of(1 << 20).max(PART_BYTES) as usize;
        let inner = Arc::clone(&self.inner);
        Ok(Box::new(Sending { inner, key: key.to_owned(), part: Vec::new(), part_bytes, parts: None }))
    }

    fn remove(&self, keys: &[String]) -> Result<(), Failure> {
        self.inner.remove(keys)
    }

    fn stop(&self) {
        self.inner.stop.send_replace(true);
    }

    fn recover(&self) -> Result<(), Failure> {
        for Object { key, .. } in self.list(UPLOADS)? {
            let note = super::get(self, &key)?.and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
            if let Some(note) = note {
                tracing::info!("an upload of {} that was not ended is broken off", self.address(&note.key));
                self.inner.abort(&note.key, &note.upload)?;
            }
            self.remove(&[key])?;
        }
        Ok(())
    }
}

/// An object that is read.
struct Reading {
    inner: Arc<Inner>,
    address: String,
    pieces: BoxStream<'static, object_store::Result<Bytes>>,
    piece: Bytes,
}

impl Read for Reading {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            // A timer is made within the runtime.
            let next = async { tokio::time::timeout(READ_LIMIT, self.pieces.next()).await };
            let next = self.inner.runtime.block_on(next);
            let failed = |what: &dyn fmt::Display| {
                io::Error::other(Failure::new(Code::Store, format!("{} cannot be read: {what}", self.address)))
            };
            match next {
                Ok(Some(Ok(piece))) => self.piece = piece,
                Ok(Some(Err(error))) => return Err(failed(&self.inner.cause(&error))),
                Ok(None) => return Ok(0),
                Err(_) => return Err(failed(&format!("nothing arrived within {} s", READ_LIMIT.as_secs()))),
            }
        }
        let length = into.len().min(self.piece.len());
        into[..length].copy_from_slice(&self.piece[..length]);
        self.piece.advance(length);
        Ok(length)
    }
}

/// An object that is sent.
struct Sending {
    inner: Arc<Inner>,
    key: String,
    /// What has not been sent.
    part: Vec<u8>,
    part_bytes: usize,
    /// The parts, if it has more than one.
    parts: Option<Parts>,
}

struct Parts {
    path: Path,
    upload: MultipartId,
    /// The key of the note.
    note: String,
    on_their_way: JoinSet<(usize, object_store::Result<PartId>)>,
    done: Vec<Option<PartId>>,
}

impl Sending {
    /// Begins an object of several parts.
    fn begin(&self) -> Result<Parts, Failure> {
        let path = self.inner.path(&self.key)?;
        let upload = self.inner.wait(&self.key, self.inner.s3.create_multipart(&path))?;
        let name = crc64(0, format!("{} {upload}", self.key).as_bytes());
        let note = format!("{UPLOADS}/{name:016x}");
        let noted = serde_json::to_vec(&Note { key: self.key.clone(), upload: upload.clone() });
        let noted = noted.map_err(|error| Failure::local(error.to_string()));
        if let Err(failure) = noted.and_then(|bytes| self.inner.put(&note, bytes)) {
            _ = self.inner.abort(&self.key, &upload); // it has no parts
            return Err(failure);
        }
        Ok(Parts { path, upload, note, on_their_way: JoinSet::new(), done: Vec::new() })
    }

    /// Sends what has come.
    fn send(&mut self) -> Result<(), Failure> {
        if self.parts.is_none() {
            self.parts = Some(self.begin()?);
        }
        let part = std::mem::replace(&mut self.part, Vec::with_capacity(self.part_bytes));
        let Some(parts) = &mut self.parts else { return Ok(()) };
        if parts.on_their_way.len() >= AT_ONCE {
            parts.arrived(&self.inner, &self.key)?;
        }
        let (s3, path, upload) = (Arc::clone(&self.inner.s3), parts.path.clone(), parts.upload.clone());
        let number = parts.done.len();
        parts.done.push(None);
        let sending = async move { (number, s3.put_part(&path, &upload, number, PutPayload::from(part)).await) };
        parts.on_their_way.spawn_on(sending, &self.inner.runtime);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), Failure> {
        if self.parts.is_none() {
            return self.inner.put(&self.key, std::mem::take(&mut self.part));
        }
        if !self.part.is_empty() {
            self.send()?;
        }
        let Some(parts) = &mut self.parts else { return Ok(()) };
        while !parts.on_their_way.is_empty() {
            parts.arrived(&self.inner, &self.key)?;
        }
        let done: Vec<PartId> = parts.done.iter().flatten().cloned().collect();
        self.inner.wait(&self.key, self.inner.s3.complete_multipart(&parts.path, &parts.upload, done))?;
        let note = parts.note.clone();
        self.parts = None;
        self.inner.remove(&[note])
    }
}

impl Parts {
    /// Waits until one part has arrived.
    fn arrived(&mut self, inner: &Inner, key: &str) -> Result<(), Failure> {
        match inner.unless_stopped(key, self.on_their_way.join_next())? {
            None => Ok(()),
            Some(Ok((number, Ok(part)))) => {
                if let Some(done) = self.done.get_mut(number) {
                    *done = Some(part);
                }
                Ok(())
            }
            Some(Ok((_, Err(error)))) => Err(inner.failed(key, &error)),
            Some(Err(error)) => Err(Failure::local(format!(
                "{}: a task failed: {error}; this is a bug of remora, please report it",
                inner.address(key)
            ))),
        }
    }
}

impl Write for Sending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.part_bytes.saturating_sub(self.part.len());
        let taken = bytes.get(..room.min(bytes.len())).unwrap_or_default();
        self.part.extend_from_slice(taken);
        if self.part.len() >= self.part_bytes {
            self.send().map_err(io::Error::other)?;
        }
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Upload for Sending {
    fn finish(mut self: Box<Self>) -> Result<(), Failure> {
        self.complete()
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let Some(mut parts) = self.parts.take() else { return };
        self.inner.runtime.block_on(parts.on_their_way.shutdown());
        let aborted = self.inner.abort(&self.key, &parts.upload);
        if let Err(failure) = aborted.and_then(|()| self.inner.remove(&[parts.note])) {
            tracing::warn!("an upload was not broken off, which the next backup does: {failure}");
        }
    }
}

// HTTP: the requests of the object store's client by hyper, with the TLS and the certificate authorities that the rest
// of this program uses.

/// How long a connection may take to come up.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How long an answer may take to begin, from the first byte of the request on: a part of an upload in two minutes is
/// half a megabit per second.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// How long an unused connection is kept.
const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// Makes the clients.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let unusable = |source: std::io::Error| object_store::Error::Generic { store: "S3", source: Box::new(source) };
        let mut tcp = Tcp::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_LIMIT));
        tcp.set_nodelay(true);
        // Which addresses may be without TLS was decided before. A machine's credentials come by http always.
        let builder = HttpsConnectorBuilder::new().with_native_roots().map_err(unusable)?;
        let connector = builder.https_or_http().enable_http1().wrap_connector(tcp);
        let mut client = Client::builder(TokioExecutor::new());
        client.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_LIMIT);
        Ok(HttpClient::new(Service { client: client.build(connector), is_away: AtomicBool::new(false) }))
    }
}

/// A client.
#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<Tcp>, HttpRequestBody>,
    /// Whether the last request got no answer.
    is_away: AtomicBool,
}

impl Service {
    /// Says when a store does not answer, and when it does again. Whether a machine has a role is no news.
    fn note(&self, store: &str, lost: Option<&HttpError>) {
        if store.starts_with(ROLE_ADDRESS) || self.is_away.swap(lost.is_some(), Ordering::Relaxed) == lost.is_some() {
            return;
        }
        match lost {
            Some(error) => tracing::warn!(
                event = events::RETRYING,
                "the object store {store} does not answer: {}; trying again (--retry-for)",
                cause_of(error)
            ),
            None => tracing::info!("the object store {store} answers again"),
        }
    }
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let store = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let answer = match tokio::time::timeout(ANSWER_LIMIT, self.client.request(request)).await {
            Err(late) => Err(HttpError::new(HttpErrorKind::Timeout, late)),
            Ok(Err(error)) => {
                let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
                Err(HttpError::new(kind, Chain::of(&error)))
            }
            Ok(Ok(answer)) => Ok(answer),
        };
        self.note(&store, answer.as_ref().err());
        Ok(answer?.map(|body| {
            let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, Chain::of(&error)));
            HttpResponseBody::new(body)
        }))
    }
}

/// An error with its causes: hyper's own texts do not name them.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Chain(String);

impl Chain {
    fn of(error: &dyn Error) -> Chain {
        let (mut text, mut cause) = (error.to_string(), error.source());
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        Chain(text)
    }
}

// Credentials: keys from a file in the format of `~/.aws/credentials`.

/// Bytes of a file at most: some hundred profiles.
const FILE_BYTES: usize = 64 << 10;

/// The profile that counts if none is named.
const PROFILE: &str = "default";

/// The file that the tools of AWS read, if it is there.
pub(super) fn usual_file() -> Option<PathBuf> {
    let named = std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let file =
        named.or_else(|| std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".aws/credentials")));
    file.filter(|file| file.is_file())
}

/// Reads the keys of the profile `AWS_PROFILE`, or `default`.
///
/// # Errors
/// The file cannot be read, is not for its owner alone, or has no such profile.
pub(super) fn read(file: &std::path::Path) -> Result<AwsCredential, Failure> {
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::refused(format!("the credentials in {} cannot be used: {what}", file.display()))
    };
    let bytes = token::read(file, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
    if bytes.len() > FILE_BYTES {
        return Err(unusable(&"the file is too long"));
    }
    let text = String::from_utf8(bytes).map_err(|_| unusable(&"the file is not text"))?;
    let profile = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
    let profile = profile.as_deref().unwrap_or(PROFILE);
    parse(&text, profile).map_err(|what| unusable(&what))
}

fn parse(text: &str, profile: &str) -> Result<AwsCredential, String> {
    let (mut key_id, mut secret_key, mut token, mut is_meant, mut is_there) = (None, None, None, false, false);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_meant = name.trim() == profile;
            is_there |= is_meant;
        } else if let (true, Some((name, value))) = (is_meant, line.split_once('=')) {
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match &*name.trim().to_ascii_lowercase() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    match (key_id, secret_key) {
        (Some(key_id), Some(secret_key)) => Ok(AwsCredential { key_id, secret_key, token }),
        _ if is_there => Err(format!("the profile {profile} needs aws_access_key_id and aws_secret_access_key")),
        _ => Err(format!("it has no profile {profile}; AWS_PROFILE names another one")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_address_without_tls_is_for_this_host_only_unless_that_is_allowed() {
        for (endpoint, allowed, is_taken) in [
            ("https://store:9000", false, true),
            ("http://127.0.0.1:9000", false, true),
            ("http://[::1]:9000", false, true),
            ("http://localhost", false, true),
            ("http://store:9000", false, false),
            ("http://store:9000", true, true),
            ("store:9000", true, false),
            ("ftp://store", true, false),
            ("", true, false),
        ] {
            assert_eq!(check_endpoint(endpoint, allowed).is_ok(), is_taken, "{endpoint}");
        }
    }

    const TEXT: &str = "# keys\n[default]\naws_access_key_id = id\naws_secret_access_key=se=cret\n\n\
                        [other]\nAWS_ACCESS_KEY_ID=id2\naws_secret_access_key = s2\naws_session_token = t2\n[half]\naws_access_key_id=x\n";

    #[test]
    fn what_a_store_answers_is_said_without_its_xml() {
        let text = "Server returned non-2xx status code: 403 Forbidden: <?xml?><Error><Code>AccessDenied</Code>\
                    <Message>Access Denied.</Message></Error>";
        assert_eq!(answer(text).as_deref(), Some("AccessDenied: Access Denied"));
        assert_eq!(answer("<Code>SlowDown</Code><Message></Message>").as_deref(), Some("SlowDown"));
        assert_eq!(answer("no answer at all"), None);
    }

    #[test]
    fn an_error_of_a_connection_names_its_cause_alone() {
        let cause = Chain("client error (Connect): tcp connect error: Connection refused (os error 111)".to_owned());
        let source = Box::new(HttpError::new(HttpErrorKind::Connect, cause));
        let (kind, text) = http_error(&object_store::Error::Generic { store: "S3", source }).unwrap();
        assert_eq!((kind, &*text), (HttpErrorKind::Connect, "Connection refused (os error 111)"));
    }

    #[test]
    fn the_keys_of_one_profile_are_read() {
        let read = parse(TEXT, "default").unwrap();
        assert_eq!((&*read.key_id, &*read.secret_key, read.token), ("id", "se=cret", None));
        let read = parse(TEXT, "other").unwrap();
        assert_eq!((&*read.key_id, &*read.secret_key, read.token.as_deref()), ("id2", "s2", Some("t2")));
        assert!(parse(TEXT, "half").unwrap_err().contains("half needs"));
        assert!(parse(TEXT, "missing").unwrap_err().contains("no profile missing"));
    }
}
