//! HTTP: the requests of the object store's client by hyper, with the TLS and the certificate authorities that the rest
//! of this program uses.

use std::error::Error;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};

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
        Ok(HttpClient::new(Service { client: client.build(connector) }))
    }
}

/// A client.
#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<Tcp>, HttpRequestBody>,
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = tokio::time::timeout(ANSWER_LIMIT, self.client.request(request)).await;
        let answer = answer.map_err(|late| HttpError::new(HttpErrorKind::Timeout, late))?;
        let answer = answer.map_err(|error| {
            let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
            HttpError::new(kind, Chain::of(&error))
        })?;
        Ok(answer.map(|body| {
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
