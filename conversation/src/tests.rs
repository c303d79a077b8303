//! Conversations over real sockets, with time limits of tenths of a second. Some have a proxy in between that forwards
//! bytes or does not.
#![allow(clippy::unwrap_used)]

use super::*;
use remora_messenger::handshake::MAGIC;
use remora_protocol::{Outcome, RefusalCode, WaitCause};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

fn token() -> Token {
    Token::new(b"the token of both ends").unwrap()
}

fn other_token() -> Token {
    Token::new(b"the token of another end").unwrap()
}

/// Short limits, for tests that wait for them.
fn impatient() -> Options {
    Options {
        connect_timeout: 4 * TENTH,
        handshake_timeout: 4 * TENTH,
        ping_after: TENTH,
        silence_limit: 5 * TENTH,
        send_queue: 4,
        security: Security::default(),
        peer_name: None,
        source_key: None,
    }
}

const TENTH: Duration = Duration::from_millis(100);

/// What a busy machine may take for what is done within a second.
const BUSY: Duration = Duration::from_secs(20);

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Both ends of a conversation over loopback, each with its token.
async fn pair(client: Token, server: Token) -> (Result<Connection>, Result<Connection>) {
    let (listener, address) = listener().await;
    let endpoint = Endpoint::new(&server, &Options::default()).unwrap();
    let accepting = async { endpoint.accept(listener.accept().await.unwrap().0, false).await };
    let options = Options::default();
    tokio::join!(connect(address, &client, &options), accepting)
}

async fn talking() -> (Connection, Connection) {
    let (client, server) = pair(token(), token()).await;
    (client.unwrap(), server.unwrap())
}

/// Both ends of a conversation through a proxy. The test gets the proxy's two sockets once the session is open.
async fn talking_through(client: &Options, server: &Options) -> (Connection, Connection, TcpStream, TcpStream) {
    let ((near, near_address), (far, far_address)) = (listener().await, listener().await);
    let token = token();
    let endpoint = Endpoint::new(&token, server).unwrap();
    let accepting = async { endpoint.accept(far.accept().await.unwrap().0, false).await };
    let between = async {
        let mut near = near.accept().await.unwrap().0;
        let mut far = TcpStream::connect(far_address).await.unwrap();
        let _ = timeout(3 * TENTH, tokio::io::copy_bidirectional(&mut near, &mut far)).await;
        (near, far)
    };
    let (client, server, (near, far)) = tokio::join!(connect(near_address, &token, client), accepting, between);
    (client.unwrap(), server.unwrap(), near, far)
}

/// Sends these bytes to a server and waits. Returns the server's fault and its answer.
async fn server_receives(bytes: &[u8]) -> (Fault, Vec<u8>) {
    let (listener, address) = listener().await;
    let endpoint = Endpoint::new(&token(), &Options::default()).unwrap();
    let mut stranger = TcpStream::connect(address).await.unwrap();
    stranger.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let accepting = async { endpoint.accept(listener.accept().await.unwrap().0, false).await };
    let (outcome, read) = tokio::join!(accepting, stranger.read_to_end(&mut answer));
    drop(read); // unread bytes make the close a reset
    (outcome.unwrap_err().fault, answer)
}

/// Connects a client to a listener that answers with these bytes and closes. Returns the client's error.
async fn client_receives(bytes: &'static [u8]) -> Error {
    client_receives_after(HELLO_BYTES, bytes).await
}

/// As `client_receives`, but the listener reads `read` bytes of the handshake first.
async fn client_receives_after(read: usize, bytes: &'static [u8]) -> Error {
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

/// Magic, preamble, fields of a Hello, and the payload's checksum.
const HELLO_BYTES: usize = 8 + 12 + 44 + 4;

fn leave(text: &str) -> Message {
    Message::Leave { outcome: Outcome::Stopped, text: text.to_owned() }
}

fn waiting(number: u64) -> Message {
    Message::Waiting { cause: WaitCause::NotYet, text: number.to_string() }
}

#[tokio::test]
async fn two_ends_with_one_token_exchange_messages() {
    let (mut client, mut server) = talking().await;
    assert_eq!(client.session(), server.session());
    assert_eq!(client.session_key(), server.session_key());
    assert_eq!((client.version(), server.version()), (NEWEST_VERSION, NEWEST_VERSION));
    assert_eq!(client.peer_addr(), server.local_addr());
    assert_eq!(client.local_addr(), server.peer_addr());
    client.send(leave("the end")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("the end"));
    server.send(waiting(3)).await.unwrap();
    assert_eq!(client.receive().await.unwrap(), waiting(3));
}

#[tokio::test]
async fn halves_serve_in_tasks_of_their_own_and_messages_keep_their_order() {
    let (client, server) = talking().await;
    let (sender, _receiver) = server.split();
    let sending = tokio::spawn(async move {
        for number in 0..1000 {
            sender.clone().send(waiting(number)).await.unwrap();
        }
        sender
    });
    let (_sender, mut receiver) = client.split();
    let receiving = tokio::spawn(async move {
        for number in 0..1000 {
            assert_eq!(receiver.receive().await.unwrap(), waiting(number));
        }
    });
    receiving.await.unwrap();
    sending.await.unwrap();
}

#[tokio::test]
async fn one_endpoint_has_many_conversations_each_with_a_number_and_a_key_of_its_own() {
    let (listener, address) = listener().await;
    let endpoint = Endpoint::new(&token(), &Options::default()).unwrap();
    let (token, options) = (token(), Options::default());
    let (mut sessions, mut held) = (Vec::new(), Vec::new());
    for number in 0..5 {
        let accepting = async { endpoint.accept(listener.accept().await.unwrap().0, false).await };
        let (client, server) = tokio::join!(connect(address, &token, &options), accepting);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        assert_eq!((client.session(), client.session_key()), (server.session(), server.session_key()));
        sessions.push((client.session(), client.session_key()));
        client.send(leave(&number.to_string())).await.unwrap();
        assert_eq!(server.receive().await.unwrap(), leave(&number.to_string()));
        held.push((client, server));
    }
    sessions.sort_unstable();
    sessions.dedup_by(|one, other| one.0 == other.0 || one.1 == other.1);
    assert_eq!(sessions.len(), 5);
}

#[tokio::test]
async fn both_ends_report_that_the_tokens_differ() {
    let (client, server) = pair(other_token(), token()).await;
    let (client, server) = (client.unwrap_err(), server.unwrap_err());
    assert!(client.to_string().contains("the source does not hold the same token"), "{client}");
    assert!(server.to_string().contains("the replica does not hold the same token"), "{server}");
    assert!(!client.fault.may_pass() && !server.fault.may_pass());
}

#[tokio::test]
async fn a_peer_of_another_protocol_is_named_and_gets_no_answer() {
    for (bytes, what) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP"),
        (b"*1\r\n$4\r\nPING\r\n", "RESP"),
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"REMOTE", "REMOTE"),
    ] {
        let (fault, answer) = server_receives(bytes).await;
        assert!(matches!(&fault, Fault::NotRemora { looks_like } if looks_like.contains(what)), "{fault}");
        assert_eq!(answer, b"", "{what}");
    }
}

#[tokio::test]
async fn a_client_names_what_it_was_pointed_at() {
    let error = client_receives(b"-ERR unknown command 'REMORA'\r\n").await;
    assert!(error.to_string().contains("Redis or Valkey server"), "{error}");
    let error = client_receives(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(error.to_string().contains("HTTP"), "{error}");
    let error = client_receives(b"").await;
    assert!(matches!(error.fault, Fault::ClosedEarly), "{error}");
    let error = client_receives_after(1, b"").await;
    assert!(matches!(error.fault, Fault::ClosedEarly), "{error}");
}

#[tokio::test]
async fn a_source_that_is_full_refuses_as_busy() {
    let (listener, address) = listener().await;
    let turning_away = async { turn_away(listener.accept().await.unwrap().0).await };
    let (token, options) = (token(), Options::default());
    let (outcome, ()) = tokio::join!(connect(address, &token, &options), turning_away);
    let error = outcome.unwrap_err();
    assert!(matches!(error.fault, Fault::Busy), "{error}");
    assert!(error.fault.may_pass());
}

#[tokio::test]
async fn an_address_without_a_listener_is_unreachable_and_named() {
    let (listener, address) = listener().await;
    drop(listener);
    let error = connect(address, &token(), &Options::default()).await.unwrap_err();
    assert!(matches!(error.fault, Fault::Unreachable(_)), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test]
async fn a_refusal_ends_the_conversation_as_an_error() {
    let (mut client, mut server) = talking().await;
    let refusal = Message::Refused { code: RefusalCode::PrimaryRefuses, text: "no right to PSYNC".to_owned() };
    server.send(refusal).await.unwrap();
    for _ in 0..2 {
        let error = client.receive().await.unwrap_err();
        assert!(error.to_string().contains("refused: no right to PSYNC (the primary refuses)"), "{error}");
    }
}

#[tokio::test]
async fn a_message_that_only_the_other_side_may_send_is_out_of_turn() {
    let (mut client, mut server) = talking().await;
    client.send(waiting(0)).await.unwrap();
    let error = server.receive().await.unwrap_err();
    assert!(matches!(&error.fault, Fault::OutOfTurn { what } if what == "Waiting"), "{error}");
}

#[tokio::test]
async fn a_dropped_connection_is_closed_after_its_last_message() {
    let (client, mut server) = talking().await;
    let (sender, receiver) = client.split();
    sender.send(leave("first")).await.unwrap();
    sender.send(leave("last")).await.unwrap();
    drop((sender, receiver));
    assert_eq!(server.receive().await.unwrap(), leave("first"));
    assert_eq!(server.receive().await.unwrap(), leave("last"));
    let error = server.receive().await.unwrap_err();
    assert!(matches!(error.fault, Fault::Closed), "{error}");
    let error = server.send(waiting(0)).await.unwrap_err();
    assert!(matches!(error.fault, Fault::Closed), "{error}");
}

#[tokio::test]
async fn the_last_message_arrives_although_the_peer_was_still_sending() {
    let (mut client, mut server) = talking().await;
    for _ in 0..50 {
        client.send(leave("unread")).await.unwrap();
    }
    server.receive().await.unwrap(); // the others are unread when this end closes
    server.send(waiting(7)).await.unwrap();
    let finishing = tokio::spawn(server.finish());
    assert_eq!(client.receive().await.unwrap(), waiting(7));
    assert!(matches!(client.receive().await.unwrap_err().fault, Fault::Closed));
    drop(client);
    finishing.await.unwrap();
}

#[tokio::test]
async fn a_message_beyond_its_bounds_is_our_mistake_and_leaves_the_connection_whole() {
    let (mut client, mut server) = talking().await;
    let join = remora_protocol::Join {
        name: "x".repeat(remora_protocol::MAX_NAME_BYTES + 1),
        server: String::new(),
        resume: None,
        plan_only: false,
        zone: String::new(),
        relays: None,
    };
    let error = client.send(Message::Join(join)).await.unwrap_err();
    assert!(matches!(error.fault, Fault::TooLarge(_)), "{error}");
    client.send(leave("still here")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("still here"));
}

#[tokio::test]
async fn pings_keep_an_idle_conversation_alive() {
    let options = impatient();
    let (mut client, mut server, mut near, mut far) = talking_through(&options, &options).await;
    let passing = tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
    let long = options.silence_limit * 3;
    let quiet = async { tokio::join!(timeout(long, client.receive()), timeout(long, server.receive())) };
    let (client_heard, server_heard) = quiet.await;
    assert!(client_heard.is_err() && server_heard.is_err(), "nothing but pings");
    client.send(leave("at last")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("at last"));
    drop((client, server));
    passing.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_silent_peer_is_given_up_after_the_limit() {
    let options = impatient();
    let (_client, mut server, _near, _far) = talking_through(&Options::default(), &options).await;
    let begun = Instant::now();
    let error = server.receive().await.unwrap_err();
    assert!(matches!(error.fault, Fault::PeerSilent { limit } if limit == options.silence_limit), "{error}");
    assert!(begun.elapsed() < options.silence_limit + BUSY);
    let error = server.send(waiting(0)).await.unwrap_err();
    assert!(matches!(error.fault, Fault::PeerSilent { .. }), "{error}");
}

#[tokio::test]
async fn an_end_that_was_kept_from_receiving_does_not_blame_the_peer() {
    let (client, mut server) = talking().await;
    std::thread::sleep(3 * TENTH); // blocks the only thread of the runtime
    let (sender, _receiver) = client.split();
    sender.send(leave("you there?")).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("you there?"));
}

#[tokio::test]
async fn an_owner_that_receives_nothing_costs_a_bounded_mailbox_and_its_peer_finds_a_full_queue() {
    let options = Options { send_queue: 4, ..Options::default() };
    let (client, server, mut near, mut far) = talking_through(&options, &options).await;
    let passing = tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
    let (sender, _server_receiver) = server.split();
    let (_client_sender, mut receiver) = client.split();
    let long = Message::Waiting { cause: WaitCause::NotYet, text: "x".repeat(1000) };
    let mut sent = 0;
    let full = loop {
        match timeout(5 * TENTH, sender.send(long.clone())).await {
            Ok(Ok(())) => sent += 1,
            Ok(Err(error)) => panic!("{error}"),
            Err(_) => break sender.try_send(long.clone()).unwrap_err(),
        }
        assert!(sent < 100_000, "the sender is never blocked");
    };
    assert!(matches!(full.fault, Fault::QueueFull { queued: 4 }), "{full}");
    for _ in 0..sent {
        assert_eq!(receiver.receive().await.unwrap(), long); // nothing is lost
    }
    passing.abort();
}

#[tokio::test]
async fn a_peer_that_takes_no_bytes_is_given_up() {
    let (_client, server, _near, far) = talking_through(&Options::default(), &impatient()).await;
    let (sender, mut receiver) = server.split();
    let long = Message::Waiting { cause: WaitCause::NotYet, text: "x".repeat(1000) };
    let error = loop {
        if let Err(error) = sender.send(long.clone()).await {
            break error;
        }
    };
    drop(far);
    // Whichever limit passes first: nothing is received, or nothing is read.
    let expected = |fault: &Fault| matches!(fault, Fault::PeerNotReading { .. } | Fault::PeerSilent { .. });
    assert!(expected(&error.fault), "{error}");
    let error = receiver.receive().await.unwrap_err();
    assert!(expected(&error.fault), "{error}");
}

#[tokio::test]
async fn a_greeting_that_dribbles_is_cut_at_its_limit() {
    let (listener, address) = listener().await;
    let endpoint = Endpoint::new(&token(), &impatient()).unwrap();
    let dribble = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for byte in MAGIC {
            sleep(TENTH).await;
            if stream.write_all(&[byte]).await.is_err() {
                return;
            }
        }
    };
    let begun = Instant::now();
    let accepting = async { endpoint.accept(listener.accept().await.unwrap().0, false).await };
    let (outcome, ()) = tokio::join!(accepting, dribble);
    let fault = outcome.unwrap_err().fault;
    assert!(matches!(fault, Fault::TimedOut { doing: "the handshake", .. }), "{fault}");
    assert!(begun.elapsed() < BUSY);
}

#[tokio::test]
async fn a_listener_that_never_answers_is_cut_at_the_limit() {
    let (_listener, address) = listener().await;
    let begun = Instant::now();
    let error = connect(address, &token(), &impatient()).await.unwrap_err();
    assert!(matches!(error.fault, Fault::TimedOut { .. }), "{error}");
    assert!(begun.elapsed() < BUSY);
}

#[tokio::test]
async fn a_frame_played_twice_ends_the_session() {
    let (mut client, mut server, mut near, mut far) = talking_through(&Options::default(), &Options::default()).await;
    client.send(leave("once")).await.unwrap();
    let mut frame = vec![0; 4096];
    let length = near.read(&mut frame).await.unwrap();
    far.write_all(&frame[..length]).await.unwrap();
    assert_eq!(server.receive().await.unwrap(), leave("once"));
    far.write_all(&frame[..length]).await.unwrap();
    for _ in 0..2 {
        let error = server.receive().await.unwrap_err();
        assert!(matches!(error.fault, Fault::Forged { .. }), "{error}");
    }
}
