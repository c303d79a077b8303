//! An S3 server in the test's process: objects are files, and a request can be held.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use remora_lab::scratch;
use remora_lab::server::wait_until;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::kit::{LONG, Stage};

/// The bucket, and what keys begin with.
const BUCKET: &str = "backups";
const PREFIX: &str = "some/orders";

/// A server with one bucket. Dropping it ends it.
pub(super) struct Store {
    folder: TempDir,
    address: SocketAddr,
    held: Arc<Held>,
    service: Arc<S3Service>,
    /// `None` while it is stopped.
    runtime: Option<Runtime>,
}

/// Requests that are not answered.
#[derive(Default)]
struct Held {
    /// What their addresses contain.
    part: Mutex<Option<String>>,
    count: Mutex<usize>,
}

impl Held {
    fn takes<T>(&self, request: &Request<T>) -> bool {
        let part = self.part.lock().unwrap();
        let is_held = part.as_ref().is_some_and(|part| request.uri().to_string().contains(part));
        *self.count.lock().unwrap() += usize::from(is_held);
        is_held
    }
}

impl Store {
    pub(super) fn start() -> Store {
        let folder = scratch::folder("store").unwrap();
        fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        service.set_auth(SimpleAuth::from_single("the-id", "the-secret"));
        let (service, held) = (Arc::new(service.build()), Arc::new(Held::default()));
        let mut store = Store { folder, address: ([127, 0, 0, 1], 0).into(), held, service, runtime: None };
        store.start_again();
        store
    }

    /// Ends the server. Its objects and its address stay.
    pub(super) fn stop(&mut self) {
        self.runtime = None;
    }

    /// Starts the server at its address.
    pub(super) fn start_again(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        runtime.spawn(serve(listener, Arc::clone(&self.service), Arc::clone(&self.held)));
        self.runtime = Some(runtime);
    }

    /// Waits in the place of the stopped server until a client has connected, and closes that connection.
    pub(super) fn wait_for_a_client(&self) {
        drop(std::net::TcpListener::bind(self.address).unwrap().accept().unwrap());
    }

    pub(super) fn url(&self) -> String {
        format!("s3://{BUCKET}/{PREFIX}")
    }

    /// The options by which it is reached.
    pub(super) fn options(&self, stage: &Stage) -> Vec<String> {
        let keys = stage.secret("keys", "[default]\naws_access_key_id = the-id\naws_secret_access_key = the-secret");
        let endpoint = format!("http://{}", self.address);
        ["--s3-endpoint", &endpoint, "--s3-credentials-file", &keys].map(str::to_owned).to_vec()
    }

    /// Holds all requests whose address contains this.
    pub(super) fn hold(&self, part: Option<&str>) {
        *self.held.part.lock().unwrap() = part.map(str::to_owned);
    }

    /// Waits until a request is held.
    pub(super) fn wait_for_held(&self) {
        wait_until("a request to be held", LONG, || {
            Ok(if *self.held.count.lock().unwrap() > 0 { Ok(()) } else { Err("none".to_owned()) })
        })
        .unwrap();
    }

    /// The file of an object.
    pub(super) fn file(&self, key: &str) -> PathBuf {
        self.folder.path().join(BUCKET).join(PREFIX).join(key)
    }

    /// The keys of all objects, in order.
    pub(super) fn keys(&self) -> Vec<String> {
        fn add(folder: &Path, root: &Path, keys: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.path() {
                    path if path.is_dir() => add(&path, root, keys),
                    path => keys.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
                }
            }
        }
        let (root, mut keys) = (self.file(""), Vec::new());
        add(&root, &root, &mut keys);
        keys.sort();
        keys
    }

    /// The keys without the notes of the command.
    pub(super) fn backups(&self, end: &str) -> Vec<String> {
        self.keys().into_iter().filter(|key| !key.starts_with('.') && key.ends_with(end)).collect()
    }

    /// Parts of uploads that have not been completed.
    pub(super) fn parts(&self) -> usize {
        let names = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().contains(".part-")).count()
    }
}

async fn serve(listener: TcpListener, service: Arc<S3Service>, held: Arc<Held>) {
    while let Ok((socket, _)) = listener.accept().await {
        let (service, held) = (Arc::clone(&service), Arc::clone(&held));
        tokio::spawn(async move {
            let answer = service_fn(move |request: Request<Incoming>| {
                let (service, is_held) = (Arc::clone(&service), held.takes(&request));
                async move {
                    if is_held {
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, Infallible>(service.call(request.map(s3s::Body::from)).await.unwrap())
                }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            _ = connection.serve_connection(TokioIo::new(socket), answer).await; // a killed client ends it in the middle
        });
    }
}
