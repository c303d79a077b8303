#![allow(clippy::unwrap_used)]

use super::*;

const REPLID: &str = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
const OTHER: &str = "0123456789abcdef0123456789abcdef01234567";
const MARK: &str = "ffffffffffffffffffffffffffffffffffffffff";

fn replid(text: &str) -> ReplId {
    text.parse().unwrap()
}

fn asked(client: &mut Client) -> String {
    let mut decoder = resp::CommandDecoder::new(resp::Limits::HANDSHAKE);
    decoder.feed(&client.take_output());
    let mut commands = Vec::new();
    while let Some(words) = decoder.next_command().unwrap() {
        let words: Vec<String> = words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect();
        commands.push(words.join(" "));
    }
    commands.join(" | ")
}

fn events(client: &mut Client) -> Vec<Event> {
    std::iter::from_fn(|| client.poll_event()).collect()
}

/// A client that expects the answer to PSYNC.
fn at_psync(options: Options) -> Client {
    let mut client = Client::new(options);
    client.handle_input(b"+PONG\r\n").unwrap();
    client.handle_input(b"+OK\r\n").unwrap();
    client.take_output();
    assert_eq!(events(&mut client), [Event::Handshaken]);
    client
}

fn resuming() -> Options {
    Options { resume: Some((replid(REPLID), 101)), ..Options::default() }
}

#[test]
fn the_commands_come_one_at_a_time_and_never_name_a_port() {
    let mut client = Client::new(Options {
        username: Some("remora".into()),
        password: Some("secret word".into()),
        rdb_version: Some("9.1.0".into()),
        ..resuming()
    });
    assert_eq!(asked(&mut client), "AUTH remora secret word");
    client.handle_input(b"+OK\r\n").unwrap();
    assert_eq!(asked(&mut client), "PING");
    client.handle_input(b"+PONG\r\n").unwrap();
    assert_eq!(asked(&mut client), "REPLCONF capa eof capa psync2");
    client.handle_input(b"+OK\r\n").unwrap();
    assert_eq!(asked(&mut client), "REPLCONF version 9.1.0");
    assert_eq!(events(&mut client), []);
    client.handle_input(b"+OK\r\n").unwrap();
    assert_eq!(events(&mut client), [Event::Handshaken]);
    assert_eq!(asked(&mut client), format!("PSYNC {REPLID} 101"));
}

#[test]
fn a_password_alone_is_that_of_the_default_user() {
    let mut client = Client::new(Options { password: Some("p".into()), ..Options::default() });
    assert_eq!(asked(&mut client), "AUTH p");
    let mut client = Client::new(Options { username: Some("u".into()), ..Options::default() });
    assert_eq!(asked(&mut client), "AUTH u ");
}

#[test]
fn a_server_that_does_not_know_versions_is_asked_all_the_same() {
    let mut client = Client::new(Options { rdb_version: Some("9.1.0".into()), ..Options::default() });
    client.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
    client.take_output();
    client.handle_input(b"-ERR Unrecognized REPLCONF option: version\r\n").unwrap();
    assert_eq!(events(&mut client), [Event::Handshaken]);
    assert_eq!(asked(&mut client), "PSYNC ? -1");
}

#[test]
fn a_full_resync_ends_at_the_first_byte_of_the_payload() {
    let wire = format!("\n\n+FULLRESYNC {REPLID} 100\r\n\n\n$EOF:{MARK}\r\n");
    let sent = format!("{wire}\n\nREDIS0011");
    let mut client = at_psync(Options::default());
    assert_eq!(client.handle_input(sent.as_bytes()), Ok(wire.len()));
    assert_eq!(
        events(&mut client),
        [
            Event::KeepAlive,
            Event::FullResync { replid: replid(REPLID), offset: 100 },
            Event::KeepAlive,
            Event::Payload(Payload::Mark(MARK.as_bytes().try_into().unwrap())),
        ]
    );
    assert_eq!(client.handle_input(b"REDIS"), Ok(0));
    assert!(client.is_ended());
}

#[test]
fn a_payload_of_known_length_is_understood() {
    let mut client = at_psync(Options::default());
    let wire = format!("+FULLRESYNC {REPLID} 0\r\n$18446744073709551615\r\n");
    assert_eq!(client.handle_input(wire.as_bytes()), Ok(wire.len()));
    assert_eq!(events(&mut client).last(), Some(&Event::Payload(Payload::Length(u64::MAX))));
}

#[test]
fn an_offset_that_has_no_next_one_is_refused() {
    for (offset, is_valid) in [(crate::MAX_OFFSET, true), (crate::MAX_OFFSET + 1, false), (u64::MAX, false)] {
        let mut client = at_psync(Options::default());
        let handled = client.handle_input(format!("+FULLRESYNC {REPLID} {offset}\r\n").as_bytes());
        assert_eq!(handled.is_ok(), is_valid, "{handled:?}");

        let mut channel = Client::new(Options { channel: Channel::Snapshot, ..Options::default() });
        channel.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
        let handled = channel.handle_input(format!("$ENDOFF:{offset} {REPLID} 0 77\r\n").as_bytes());
        assert_eq!(handled.is_ok(), is_valid, "{handled:?}");
    }
}

#[test]
fn a_partial_resync_ends_at_the_first_byte_of_the_stream() {
    for (answer, named) in [("+CONTINUE\r\n".to_owned(), REPLID), (format!("+CONTINUE {OTHER}\r\n"), OTHER)] {
        let mut client = at_psync(resuming());
        let sent = format!("{answer}*1\r\n$4\r\nPING\r\n");
        assert_eq!(client.handle_input(sent.as_bytes()), Ok(answer.len()));
        assert_eq!(events(&mut client), [Event::Continue { replid: replid(named) }]);
    }
}

#[test]
fn a_refusal_at_any_step_names_the_command_and_stays() {
    let mut client = Client::new(Options::default());
    let refused = client.handle_input(b"-NOAUTH Authentication required.\r\n");
    assert_eq!(refused, Err(Refusal::new("PING", b"NOAUTH Authentication required.").into()));
    assert_eq!(client.handle_input(b"+PONG\r\n"), refused);

    let mut client = at_psync(Options::default());
    let refused = client.handle_input(b"-NOMASTERLINK Can't SYNC while not connected with my master\r\n");
    let text = b"NOMASTERLINK Can't SYNC while not connected with my master";
    assert_eq!(refused, Err(Refusal::new("PSYNC", text).into()));

    // The fork failed after the server had promised a snapshot.
    let mut client = at_psync(Options::default());
    client.handle_input(format!("+FULLRESYNC {REPLID} 1\r\n").as_bytes()).unwrap();
    let refused = client.handle_input(b"-ERR BGSAVE failed, replication can't continue\r\n");
    let text = b"ERR BGSAVE failed, replication can't continue";
    assert_eq!(refused, Err(Refusal::new("PSYNC", text).into()));
}

#[test]
fn a_peer_that_is_not_a_redis_server_is_detected_at_once() {
    let answered = |bytes: &[u8]| Client::new(Options::default()).handle_input(bytes).unwrap_err().to_string();
    assert!(answered(b"HTTP/1.1 400 Bad Request\r\n").contains("it is a web server"));
    assert!(answered(b"\x15\x03\x03\x00\x02").contains("it speaks TLS"));
    assert!(answered(b"SSH-2.0-OpenSSH_9.2").contains("secure shell"));
    assert!(answered(b"220 smtp.example").contains("not a Redis or Valkey server"));
    assert!(answered(&[b'+'; 5000]).contains("more than 4096 bytes"));
}

#[test]
fn an_answer_that_does_not_fit_is_quoted() {
    for (options, answer) in [
        (Options::default(), "+CONTINUE"),
        (resuming(), "+CONTINUE nonsense"),
        (Options::default(), "+FULLRESYNC"),
        (Options::default(), "+FULLRESYNC nonsense 1"),
        (Options::default(), "+DUALCHANNELSYNC"),
        (Options::default(), "+RDBCHANNELSYNC 7"),
        (Options::default(), "$100"),
    ] {
        let mut client = at_psync(options);
        let error = client.handle_input(format!("{answer}\r\n").as_bytes()).unwrap_err();
        assert_eq!(error, Error::Unexpected { command: "PSYNC", answer: answer.into() });
    }
    for header in ["$", "$-1", "$EOF:short", "$1x"] {
        let mut client = at_psync(Options::default());
        let wire = format!("+FULLRESYNC {REPLID} 1\r\n{header}\r\n");
        assert!(matches!(client.handle_input(wire.as_bytes()), Err(Error::Unexpected { .. })), "{header}");
    }
}

#[test]
fn a_sync_over_two_connections_takes_three_handshakes() {
    let mut first = Client::new(Options { channel: Channel::WholeOrStream, ..Options::default() });
    first.handle_input(b"+PONG\r\n").unwrap();
    assert_eq!(asked(&mut first), "PING | REPLCONF capa eof capa psync2 capa dual-channel");
    first.handle_input(b"+OK\r\n+DUALCHANNELSYNC\r\n").unwrap();
    assert_eq!(events(&mut first), [Event::Handshaken, Event::TwoChannels]);
    assert!(first.is_ended());

    let version = Some("9.1.0".into());
    let mut second = Client::new(Options { channel: Channel::Snapshot, rdb_version: version, ..Options::default() });
    second.handle_input(b"+PONG\r\n+OK\r\n+OK\r\n").unwrap();
    let commands = "PING | REPLCONF capa eof rdb-only 1 rdb-channel 1 | REPLCONF version 9.1.0 | SYNC";
    assert_eq!(asked(&mut second), commands);
    let wire = format!("\n$ENDOFF:100 {REPLID} -1 77\r\n\n$EOF:{MARK}\r\n");
    assert_eq!(second.handle_input(format!("{wire}REDIS").as_bytes()), Ok(wire.len()));
    assert_eq!(
        events(&mut second)[1..],
        [
            Event::KeepAlive,
            Event::Channel { replid: replid(REPLID), offset: 100, client: 77 },
            Event::KeepAlive,
            Event::Payload(Payload::Mark(MARK.as_bytes().try_into().unwrap())),
        ]
    );

    let mut again = Client::new(Options { channel: Channel::Stream { snapshot_client: 77 }, ..resuming() });
    again.handle_input(b"+OK\r\n").unwrap();
    assert_eq!(asked(&mut again), format!("REPLCONF set-rdb-client-id 77 | PSYNC {REPLID} 101"));
    assert_eq!(again.handle_input(b"+CONTINUE\r\n*1").unwrap(), 11);
    assert_eq!(events(&mut again), [Event::Handshaken, Event::Continue { replid: replid(REPLID) }]);
}

#[test]
fn a_second_channel_that_answers_nonsense_is_quoted() {
    for answer in ["$ENDOFF:", "$ENDOFF:1 x 0 7", "$ENDOFF:x 8 0 7", "$EOF:", "+OK"] {
        let mut client = Client::new(Options { channel: Channel::Snapshot, ..Options::default() });
        client.handle_input(b"+PONG\r\n+OK\r\n").unwrap();
        let error = client.handle_input(format!("{answer}\r\n").as_bytes()).unwrap_err();
        assert_eq!(error, Error::Unexpected { command: "SYNC", answer: answer.into() });
    }
}

#[test]
fn the_password_is_not_in_the_debug_text() {
    let client = Client::new(Options { password: Some("hunter2".into()), ..Options::default() });
    assert!(!format!("{:?}", client.options).contains("hunter2"));
}

#[test]
fn an_acknowledgement_is_a_command() {
    let mut out = Vec::new();
    ack(&mut out, 42);
    assert_eq!(out, b"*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n$2\r\n42\r\n");
}
