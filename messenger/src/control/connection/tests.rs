//! The driver, over real sockets where it is about sockets, and over a pipe in memory with time standing still where it is
//! about time.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::control::session::MAGIC;
use crate::control::{Outcome, RefusalCode};
use tokio::io::DuplexStream;
use tokio::net::TcpListener;

fn token() -> Token {
    Token::new(b"the token of both ends").unwrap()
}

fn other_token() -> Token {
    Token::new(b"a token of nobody here").unwrap()
}

fn nowhere() -> (SocketAddr, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    (address, address)
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Both ends of a conversation over loopback, with a token each.
async fn pair(client: Token, server: Token) -> (Result<Connection>, Result<Connection>) {
    let (listener, address) = listener().await;
    let options = Options::default();
    let accepting = async {
        let (stream, _) = listener.accept().await.unwrap();
        accept(stream, &server, &options).await
    };
    tokio::join!(connect(address, &client, &options), accepting)
}

/// Both ends over a pipe that holds `room` bytes in each direction.
async fn piped(room: usize, client: &Options, server: &Options) -> (Connection, Connection) {
    let (near, far) = tokio::io::duplex(room);
    let token = token();
    let (client, server) = tokio::join!(
        greet_over(near, nowhere(), Role::Client, &token, client),
        greet_over(far, nowhere(), Role::Server, &token, server),
    );
    (client.unwrap(), server.unwrap())
}

/// What a server makes of a peer that says those bytes and then waits, and what it answers.
async fn server_hears(bytes: &[u8]) -> (Fault, Vec<u8>) {
    let (near, mut far) = tokio::io::duplex(4096);
    far.write_all(bytes).await.unwrap();
    let (token, options) = (token(), Options::default());
    let greeting = greet_over(near, nowhere(), Role::Server, &token, &options);
    let mut answer = Vec::new();
    let (outcome, read) = tokio::join!(greeting, far.read_to_end(&mut answer));
    read.unwrap();
    (outcome.unwrap_err(), answer)
}

/// What a client makes of a listener that answers those bytes and closes.
async fn client_hears(bytes: &'static [u8]) -> Error {
    client_hears_after(HELLO_BYTES, bytes).await
}

/// The same of a listener that reads so many bytes of the greeting first.
async fn client_hears_after(read: usize, bytes: &'static [u8]) -> Error {
    let (listener, address) = listener().await;
    let answering = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = vec![0; read];
        stream.read_exact(&mut hello).await.unwrap();
        stream.write_all(bytes).await.unwrap();
    };
    let (token, options) = (token(), Options::default());
    let (outcome, ()) = tokio::join!(connect(address, &token, &options), answering);
    outcome.unwrap_err()
}

/// Magic, preamble, the fields of a hello, and the checksum of the payload.
const HELLO_BYTES: usize = 8 + 12 + 44 + 4;

fn leave(text: &str) -> Message {
    Message::Leave { outcome: Outcome::Stopped, text: text.to_owned() }
}

fn waiting(seconds: u64) -> Message {
    Message::Waiting { reason: "a fork".to_owned(), seconds }
}

#[tokio::test]
async fn two_ends_with_one_token_agree_and_talk() {
    let (client, server) = pair(token(), token()).await;
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.session(), server.session());
    assert_eq!(client.session_key(), server.session_key());
    assert_eq!(client.version(), 1);
    assert_eq!(client.peer_addr(), server.local_addr());
    assert_eq!(client.local_addr(), server.peer_addr());
    client.send(leave("the end")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("the end"));
    server.send(waiting(3)).await.unwrap();
    assert_eq!(client.receive().await.unwrap(), waiting(3));
}

#[tokio::test]
async fn halves_serve_in_tasks_of_their_own_and_messages_keep_their_order() {
    let (client, server) = pair(token(), token()).await;
    let (sender, _receiver) = server.unwrap().split();
    let sending = tokio::spawn(async move {
        for seconds in 0..1000 {
            sender.clone().send(waiting(seconds)).await.unwrap();
        }
        sender
    });
    let (_sender, mut receiver) = client.unwrap().split();
    let receiving = tokio::spawn(async move {
        for seconds in 0..1000 {
            assert_eq!(receiver.receive().await.unwrap(), waiting(seconds));
        }
    });
    receiving.await.unwrap();
    sending.await.unwrap();
}

#[tokio::test]
async fn each_session_has_a_number_and_a_key_of_its_own() {
    let (first, _first) = pair(token(), token()).await;
    let (second, _second) = pair(token(), token()).await;
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_ne!(first.session(), second.session());
    assert_ne!(first.session_key(), second.session_key());
}

#[tokio::test]
async fn both_ends_say_that_the_tokens_differ() {
    let (client, server) = pair(other_token(), token()).await;
    let (client, server) = (client.unwrap_err(), server.unwrap_err());
    assert!(client.to_string().contains("the source does not hold the same token"), "{client}");
    assert!(server.to_string().contains("the replica does not hold the same token"), "{server}");
    assert!(!client.fault.may_pass() && !server.fault.may_pass());
}

#[tokio::test]
async fn a_stranger_is_named_and_gets_no_answer() {
    for (bytes, what) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP"),
        (b"*1\r\n$4\r\nPING\r\n", "RESP"),
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"REMOTE", "REMOTE"),
    ] {
        let (fault, answer) = server_hears(bytes).await;
        assert!(matches!(&fault, Fault::NotRemora { looks_like } if looks_like.contains(what)), "{fault}");
        assert_eq!(answer, b"", "{what}");
    }
}

#[tokio::test]
async fn a_client_names_what_it_was_pointed_at() {
    let error = client_hears(b"-ERR unknown command 'REMORA'\r\n").await;
    assert!(error.to_string().contains("Redis or Valkey server"), "{error}");
    let error = client_hears(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(error.to_string().contains("HTTP"), "{error}");
    let error = client_hears(b"").await;
    assert!(matches!(error.fault, Fault::ClosedEarly), "{error}");
    let error = client_hears_after(1, b"").await;
    assert!(matches!(error.fault, Fault::ClosedEarly), "{error}");
}

#[tokio::test]
async fn a_source_that_is_full_says_so() {
    let (listener, address) = listener().await;
    let turning_away = async { turn_away(listener.accept().await.unwrap().0).await };
    let (token, options) = (token(), Options::default());
    let (outcome, ()) = tokio::join!(connect(address, &token, &options), turning_away);
    let error = outcome.unwrap_err();
    assert!(matches!(error.fault, Fault::Busy), "{error}");
    assert!(error.fault.may_pass());
}

#[tokio::test]
async fn nobody_listening_is_unreachable_and_names_the_address() {
    let (listener, address) = listener().await;
    drop(listener);
    let error = connect(address, &token(), &Options::default()).await.unwrap_err();
    assert!(matches!(error.fault, Fault::Unreachable(_)), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn a_refusal_ends_the_conversation_as_an_error() {
    let (mut client, mut server) = piped(4096, &Options::default(), &Options::default()).await;
    let refusal = Message::Refused { code: RefusalCode::PrimaryRefuses, text: "no right to PSYNC".to_owned() };
    server.send(refusal).await.unwrap();
    let error = client.receive().await.unwrap_err();
    assert!(error.to_string().contains("refused: no right to PSYNC (the primary refuses)"), "{error}");
}

#[tokio::test]
async fn an_end_that_says_what_only_the_other_may_say_is_out_of_turn() {
    let (mut client, mut server) = piped(4096, &Options::default(), &Options::default()).await;
    client.send(waiting(0)).await.unwrap();
    let error = server.receive().await.unwrap_err();
    assert!(matches!(&error.fault, Fault::OutOfTurn { what } if what == "Waiting"), "{error}");
}

#[tokio::test]
async fn a_dropped_connection_is_closed_after_its_last_message() {
    let (client, mut server) = piped(4096, &Options::default(), &Options::default()).await;
    let (sender, _receiver) = client.split();
    sender.send(leave("first")).await.unwrap();
    sender.send(leave("last")).await.unwrap();
    drop(sender);
    assert_eq!(server.receive().await.unwrap(), leave("first"));
    assert_eq!(server.receive().await.unwrap(), leave("last"));
    let error = server.receive().await.unwrap_err();
    assert!(matches!(error.fault, Fault::Closed), "{error}");
}

#[tokio::test]
async fn a_last_word_arrives_although_the_peer_was_still_talking() {
    let (client, server) = pair(token(), token()).await;
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    for _ in 0..50 {
        client.send(leave("unread")).await.unwrap();
    }
    server.receive().await.unwrap(); // the others lie in the socket when we go
    server.send(waiting(7)).await.unwrap();
    let finishing = tokio::spawn(server.finish());
    assert_eq!(client.receive().await.unwrap(), waiting(7));
    assert!(matches!(client.receive().await.unwrap_err().fault, Fault::Closed));
    drop(client);
    finishing.await.unwrap();
}

#[tokio::test]
async fn a_message_beyond_its_bounds_is_our_mistake_and_leaves_the_connection_whole() {
    let (mut client, mut server) = piped(4096, &Options::default(), &Options::default()).await;
    let join = crate::control::Join {
        name: "x".repeat(crate::control::MAX_NAME_BYTES + 1),
        server: String::new(),
        transports: Vec::new(),
        resume: None,
        stay: false,
        plan_only: false,
    };
    let error = client.send(Message::Join(join)).await.unwrap_err();
    assert!(matches!(error.fault, Fault::TooLarge(_)), "{error}");
    client.send(leave("still here")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("still here"));
}

#[tokio::test(start_paused = true)]
async fn heart_beats_keep_an_idle_conversation_alive() {
    let (mut client, mut server) = piped(4096, &Options::default(), &Options::default()).await;
    let hour = Duration::from_secs(3600);
    let quiet = async { tokio::join!(timeout(hour, client.receive()), timeout(hour, server.receive())) };
    let (client_heard, server_heard) = quiet.await;
    assert!(client_heard.is_err() && server_heard.is_err(), "nothing but heart-beats for an hour");
    client.send(leave("at last")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("at last"));
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_given_up_after_the_limit() {
    let mute = Options { heartbeat_every: Duration::from_secs(3600), ..Options::default() };
    let (_client, mut server) = piped(4096, &mute, &Options::default()).await;
    let begun = Instant::now();
    let error = server.receive().await.unwrap_err();
    assert!(matches!(error.fault, Fault::PeerSilent { limit } if limit == SILENCE_LIMIT), "{error}");
    assert_eq!(begun.elapsed().as_secs(), SILENCE_LIMIT.as_secs());
}

#[tokio::test(start_paused = true)]
async fn an_end_that_was_kept_from_receiving_does_not_blame_the_peer() {
    let (client, mut server) = piped(65536, &Options::default(), &Options::default()).await;
    tokio::time::sleep(2 * SILENCE_LIMIT).await;
    let (sender, _receiver) = client.split();
    sender.send(leave("you there?")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("you there?"));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_reads_nothing_costs_a_bounded_queue_and_is_given_up() {
    let options = Options { send_queue: 4, ..Options::default() };
    let (_client, server) = piped(256, &Options::default(), &options).await;
    let (sender, mut receiver) = server.split();
    let full = loop {
        match sender.try_send(waiting(0)) {
            Ok(()) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert!(matches!(full.fault, Fault::QueueFull { queued: 4 }), "{full}");
    let error = receiver.receive().await.unwrap_err();
    assert!(matches!(error.fault, Fault::PeerNotReading { .. }), "{error}");
    let error = sender.send(waiting(0)).await.unwrap_err();
    assert!(matches!(error.fault, Fault::PeerNotReading { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_dribbles_is_cut_at_its_limit() {
    let (near, mut far) = tokio::io::duplex(4096);
    let (token, options) = (token(), Options::default());
    let dribble = async {
        for byte in MAGIC.iter().cycle().take(1000) {
            tokio::time::sleep(Duration::from_secs(3)).await;
            if far.write_all(&[*byte]).await.is_err() {
                return;
            }
        }
    };
    let begun = Instant::now();
    let greeting = greet_over(near, nowhere(), Role::Server, &token, &options);
    let (outcome, ()) = tokio::join!(greeting, dribble);
    let fault = outcome.unwrap_err();
    assert!(matches!(fault, Fault::TimedOut { doing: "the greeting", .. }), "{fault}");
    assert!(begun.elapsed() < HANDSHAKE_TIMEOUT + Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_never_answers_is_cut_at_the_limit() {
    let (near, _far) = tokio::io::duplex(4096);
    let begun = Instant::now();
    let outcome = greet_over(near, nowhere(), Role::Client, &token(), &Options::default()).await;
    assert!(matches!(outcome.unwrap_err(), Fault::TimedOut { .. }));
    assert_eq!(begun.elapsed().as_secs(), HANDSHAKE_TIMEOUT.as_secs());
}

/// A wire between two pipes on which the test stands: it passes bytes on, and may put in its own.
struct Between {
    client: DuplexStream,
    server: DuplexStream,
}

impl Between {
    /// Both ends, greeted, with us in the middle.
    async fn greeted() -> (Connection, Connection, Between) {
        let (near, client) = tokio::io::duplex(4096);
        let (server, far) = tokio::io::duplex(4096);
        let mut between = Between { client, server };
        let (token, options) = (token(), Options::default());
        let greeting = async {
            tokio::join!(
                greet_over(near, nowhere(), Role::Client, &token, &options),
                greet_over(far, nowhere(), Role::Server, &token, &options),
            )
        };
        let (client, server) = tokio::select! {
            (client, server) = greeting => (client.unwrap(), server.unwrap()),
            _ = tokio::io::copy_bidirectional(&mut between.client, &mut between.server) => panic!("the greeting failed"),
        };
        (client, server, between)
    }

    /// What the client says next.
    async fn take(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let length = self.client.read(&mut bytes).await.unwrap();
        bytes.truncate(length);
        bytes
    }
}

#[tokio::test]
async fn a_frame_played_twice_ends_the_session() {
    let (mut client, mut server, mut between) = Between::greeted().await;
    client.send(leave("once")).await.unwrap();
    let frame = between.take().await;
    between.server.write_all(&frame).await.unwrap();
    between.server.write_all(&frame).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("once"));
    for _ in 0..2 {
        let error = server.receive().await.unwrap_err();
        assert!(matches!(error.fault, Fault::Forged { sequence: 1 }), "{error}");
    }
}
