//! The TLS configuration of a server.

use std::fmt;
use std::sync::Arc;

use rustls::ServerConfig;

/// What says how each connection is encrypted. The owner is asked for every connection, so it may replace its
/// certificates; connections that are open go on.
#[derive(Clone)]
pub struct TlsConfig(Arc<dyn Fn() -> Arc<ServerConfig> + Send + Sync>);

impl TlsConfig {
    /// `config` is called for each connection, by its thread.
    pub fn new(config: impl Fn() -> Arc<ServerConfig> + Send + Sync + 'static) -> TlsConfig {
        TlsConfig(Arc::new(config))
    }

    /// For a connection that begins now.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        (self.0)()
    }
}

impl From<Arc<ServerConfig>> for TlsConfig {
    /// The same for every connection.
    fn from(config: Arc<ServerConfig>) -> TlsConfig {
        TlsConfig::new(move || Arc::clone(&config))
    }
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig").finish_non_exhaustive()
    }
}
