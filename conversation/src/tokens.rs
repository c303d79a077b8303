//! The tokens that an agent accepts, and what each permits.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::frame::Limits;
use remora_messenger::handshake::MAX_KEYS;
use remora_messenger::policy::Policy;
use remora_messenger::{Key, Keyring};
use remora_protocol::{MAX_CLIENT_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Side};
use tokio::net::ToSocketAddrs;

use super::security::Role;
use super::{Connection, Error, Fault, Security, SourceKey, Token};
use remora_process::exit::Failure;
use remora_process::{AbortOnDrop, events, signals};

/// What an agent needs to connect to another one.
#[derive(Clone, Debug)]
pub struct Credentials {
    tokens: Arc<Keyring>,
    /// What protects the connections.
    pub security: Security,
    /// The key that the source must hold; `None`: any.
    source_key: Option<SourceKey>,
}

impl Credentials {
    /// Connects to the source at this host name or address.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub async fn connect(&self, host: &str, port: u16) -> Result<Connection, Error> {
        let peer_name = self.security.name_of_source(host);
        let options = Options { source_key: self.source_key, peer_name, ..Options::secured(self.security.clone()) };
        let connected = self.connect_with((host, port), &options).await;
        // Without an address there is only the name.
        connected.map_err(|error| match error.fault {
            Fault::Unresolved(_) => error.fault.of(format!("{host}:{port}")),
            _ => error,
        })
    }

    /// Connects with these options, and proves the token that is in the first file now.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub async fn connect_with(&self, to: impl ToSocketAddrs, options: &Options) -> Result<Connection, Error> {
        super::connect(to, &self.tokens.first(), options).await
    }

    /// The usual options for a replica that lends slots at this host name or address.
    pub fn options_for_lender(&self, host: &str) -> Options {
        Options { peer_name: self.security.name_of_lender(host), ..Options::secured(self.security.clone()) }
    }

    /// Reads the token file of a command.
    ///
    /// # Errors
    /// The file cannot be used, or none was named, and no certificate proves who this agent is.
    pub fn read(
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
pub struct TokenFiles {
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
    pub fn read(
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
    pub fn read_again(&self) {
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
    pub fn read_again_on_hangup(&self) -> Result<AbortOnDrop, Failure> {
        let files = self.clone();
        signals::on_hangup(move || files.read_again())
    }

    /// What this agent proves where it connects: the first token, and its certificate.
    pub fn credentials(&self, source_key: Option<SourceKey>) -> Credentials {
        Credentials { tokens: self.keyring.clone(), security: self.security.clone(), source_key }
    }

    /// What protects connections.
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// All tokens, for an [`Endpoint`](super::Endpoint).
    pub fn keyring(&self) -> Arc<Keyring> {
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

// Time limits and sizes of conversations, and what protects them.

/// Time limits and sizes of a conversation. The defaults are for agents; tests use shorter limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time limit for connecting, handshake included, for each address of a name.
    pub connect_timeout: Duration,
    /// Time limit for the handshake of an accepted connection, from its first byte to the open session.
    pub handshake_timeout: Duration,
    /// Silence after which the peer is sent a ping.
    pub ping_after: Duration,
    /// How long the peer may send nothing, or read nothing, before the conversation ends. Several times `ping_after`.
    pub silence_limit: Duration,
    /// Length of the send queue, in messages.
    pub send_queue: usize,
    /// What protects the connections.
    pub security: Security,
    /// The name that the peer's certificate must be for, if names are checked; `None`: its address.
    pub peer_name: Option<String>,
    /// The key that the peer must hold; `None`: any.
    pub source_key: Option<SourceKey>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: CONNECT_TIMEOUT,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            ping_after: PING_AFTER,
            silence_limit: SILENCE_LIMIT,
            send_queue: SEND_QUEUE,
            security: Security::default(),
            peer_name: None,
            source_key: None,
        }
    }
}

impl Options {
    /// The defaults, with this protection.
    pub fn secured(security: Security) -> Options {
        Options { security, ..Options::default() }
    }

    pub(super) fn policy(&self, side: Side) -> Policy {
        let (policy, opening_limit) = match side {
            Side::Client => (Policy::lossy_client(), self.connect_timeout),
            Side::Server => (Policy::stateless_server(), self.handshake_timeout),
        };
        // A server has many conversations, so each of them may hold little of its memory.
        let (longest, mailbox_bytes) = match side {
            Side::Client => (MAX_PAYLOAD_BYTES, CLIENT_MAILBOX_BYTES),
            Side::Server => (MAX_CLIENT_PAYLOAD_BYTES, SERVER_MAILBOX_BYTES),
        };
        Policy {
            send_messages: self.send_queue.max(1),
            receive_each: Some((MAILBOX_MESSAGES, mailbox_bytes)),
            limits: Limits { front: longest, data: 0 },
            opening_limit,
            ping_after: self.ping_after,
            silence_limit: self.silence_limit,
            ..policy
        }
    }
}

/// A SYN is repeated after 1, 3 and 7 seconds. A host that has not answered by then is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two round trips and four hashes take milliseconds. The rest is for an agent that gets no processor time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A ping costs about a hundred bytes a second on an idle connection.
const PING_AFTER: Duration = Duration::from_secs(1);

/// Nine unanswered pings. Several times longer than TCP takes to repair a lost packet, and short enough that a source
/// soon frees what it keeps for a dead replica.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Length of the send queue, in messages: many seconds' worth. Most have less than a hundred bytes; the longest
/// ([`MAX_PAYLOAD_BYTES`]) is sent only on request.
const SEND_QUEUE: usize = 64;

/// Messages that may be received and not yet taken by the owner; beyond this the peer is not read. As many as the
/// peer's send queue holds.
const MAILBOX_MESSAGES: usize = 64;

/// Bytes of the messages that a client has received and its owner has not yet taken: two of the longest.
const CLIENT_MAILBOX_BYTES: usize = 2 * MAX_PAYLOAD_BYTES as usize;

/// The same at a server, which may have a thousand conversations: [`MAILBOX_MESSAGES`] of a usual length, or 16 of the
/// longest.
const SERVER_MAILBOX_BYTES: usize = 16 * MAX_CLIENT_PAYLOAD_BYTES as usize;
