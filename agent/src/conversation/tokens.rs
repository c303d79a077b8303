//! The tokens that an agent accepts, and what each permits.

use std::path::PathBuf;
use std::sync::Arc;

use remora_messenger::keyring::MAX_KEYS;
use remora_messenger::{Key, Keyring};
use tokio::net::ToSocketAddrs;

use super::role::Role;
use super::{Connection, Error, Fault, Options, Security, SourceKey, Token};
use crate::events;
use crate::exit::Failure;
use crate::signals;
use crate::tasks::AbortOnDrop;

/// What an agent needs to connect to another one.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    tokens: Arc<Keyring>,
    pub(crate) security: Security,
    /// The key that the source must hold; `None`: any.
    source_key: Option<SourceKey>,
}

impl Credentials {
    /// Connects to the source at this host name or address.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub(crate) async fn connect(&self, host: &str, port: u16) -> Result<Connection, Error> {
        let peer_name = self.security.name_of_source(host);
        let options = Options { source_key: self.source_key, peer_name, ..Options::secured(self.security.clone()) };
        self.connect_with((host, port), &options).await
    }

    /// Connects with these options, and proves the token that is in the first file now.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub(crate) async fn connect_with(&self, to: impl ToSocketAddrs, options: &Options) -> Result<Connection, Error> {
        super::connect(to, &self.tokens.first(), options).await
    }

    /// The usual options for a replica that lends slots at this host name or address.
    pub(crate) fn options_for_lender(&self, host: &str) -> Options {
        Options { peer_name: self.security.name_of_lender(host), ..Options::secured(self.security.clone()) }
    }

    /// Reads the token file of a command.
    ///
    /// # Errors
    /// The file cannot be used, or none was named, and no certificate proves who this agent is.
    pub(crate) fn read(
        token: Option<&PathBuf>,
        security: Security,
        source_key: Option<SourceKey>,
    ) -> Result<Credentials, Failure> {
        let files: Vec<PathBuf> = token.into_iter().cloned().collect();
        Ok(TokenFiles::read(&files, &[], security)?.credentials(source_key))
    }
}

/// The token files of an agent that listens.
#[derive(Clone)]
pub(crate) struct TokenFiles {
    files: Vec<(PathBuf, Role)>,
    keyring: Arc<Keyring>,
    security: Security,
}

impl TokenFiles {
    /// Reads the files: those of replicas, of which the first is the one that this agent proves where it connects, and
    /// those of other roles.
    ///
    /// # Errors
    /// A file cannot be used, two files hold the same token, there are more than [`MAX_KEYS`], or none was named for
    /// replicas, and no certificate proves who a peer is.
    pub(crate) fn read(
        replicas: &[PathBuf],
        others: &[(Role, &[PathBuf])],
        security: Security,
    ) -> Result<TokenFiles, Failure> {
        if replicas.is_empty() && security.certificates().is_none() {
            return Err(Failure::refused("no token file: give one with --token-file"));
        }
        let replicas = replicas.iter().map(|path| (path.clone(), Role::Replica));
        let others = others.iter().flat_map(|(role, paths)| paths.iter().map(|path| (path.clone(), *role)));
        let files: Vec<(PathBuf, Role)> = replicas.chain(others).collect();
        let keyring = Keyring::new(keys(&files)?)
            .map_err(|count| Failure::refused(format!("{count}; give at most {MAX_KEYS} token files in all")))?;
        Ok(TokenFiles { files, keyring: Arc::new(keyring), security })
    }

    /// Reads the files again, those of certificates too, and logs the outcome. New connections need what is in them;
    /// conversations that are open go on. If a file cannot be used, what was read before stays valid.
    pub(crate) fn read_again(&self) {
        if let Some(certificates) = self.security.certificates() {
            certificates.read_again();
        }
        let replaced = keys(&self.files)
            .and_then(|keys| self.keyring.replace(keys).map_err(|count| Failure::refused(count.to_string())));
        match replaced {
            Ok(()) => tracing::info!(event = events::TOKENS_REREAD, "token files read again"),
            Err(error) => tracing::error!(event = events::TOKENS_KEPT, %error, "the tokens read before stay valid"),
        }
    }

    /// Reads the files again on each SIGHUP, until the returned owner of the task is dropped.
    ///
    /// # Errors
    /// The system refused a handler.
    pub(crate) fn read_again_on_hangup(&self) -> Result<AbortOnDrop, Failure> {
        let files = self.clone();
        signals::on_hangup(move || files.read_again())
    }

    /// What this agent proves where it connects: the first token, and its certificate.
    pub(crate) fn credentials(&self, source_key: Option<SourceKey>) -> Credentials {
        Credentials { tokens: self.keyring.clone(), security: self.security.clone(), source_key }
    }

    /// What protects connections.
    pub(crate) fn security(&self) -> &Security {
        &self.security
    }

    /// All tokens, for an [`Endpoint`](super::Endpoint).
    pub(crate) fn keyring(&self) -> Arc<Keyring> {
        self.keyring.clone()
    }
}

/// A keyring with this token only, of [`Role::Replica`].
pub(super) fn keyring_of(token: &Token) -> Result<Arc<Keyring>, Error> {
    let token = Token::new(token.bytes()).map_err(|error| Fault::NoRandomness(error.to_string()).of("this end"))?;
    Ok(Arc::new(Keyring::only(Arc::new(token))))
}

fn keys(files: &[(PathBuf, Role)]) -> Result<Vec<Key>, Failure> {
    let mut keys: Vec<Key> = Vec::new();
    for (index, (path, role)) in files.iter().enumerate() {
        let token = Token::read_file(path).map_err(|error| Failure::refused(error.to_string()))?;
        if let Some(same) = keys.iter().position(|key| key.bytes() == token.bytes()) {
            let (one, other) = (files[same].0.display(), files[index].0.display());
            let text = format!("the token files {one} and {other} hold the same token: give each a token of its own");
            return Err(Failure::refused(text));
        }
        keys.push(Key::new(Arc::new(token), role.mark()));
    }
    if !files.iter().any(|(_, role)| *role == Role::Replica) {
        let known = Token::new(KNOWN_TOKEN).map_err(|error| Failure::local(error.to_string()))?;
        keys.push(Key::new(Arc::new(known), Role::Replica.mark()));
    }
    Ok(keys)
}

/// The token of agents whose certificates prove who they are, and that were given no token file. It is not secret: the
/// session's key depends on the TLS session too, which only the two ends know.
const KNOWN_TOKEN: &[u8] = b"remora: certificates prove who the ends are";
