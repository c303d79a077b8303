#![allow(clippy::unwrap_used)]

use super::*;

const REPLID: &str = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";

fn replid() -> ReplId {
    REPLID.parse().unwrap()
}

/// Feeds one inline command and returns the answer.
fn answer(server: &mut Server, command: &str) -> String {
    server.handle_input(format!("{command}\r\n").as_bytes()).unwrap();
    String::from_utf8(server.take_output()).unwrap()
}

fn open() -> Server {
    Server::new(Options::default())
}

/// A server whose peer sent these commands and then asked for everything.
fn asked(before: &str) -> Server {
    let mut server = open();
    server.handle_input(format!("{before}\r\nPSYNC ? -1\r\n").as_bytes()).unwrap();
    assert_eq!(server.poll_event(), Some(Event::Psync { replid: None, offset: -1 }));
    server.take_output();
    server
}

fn streaming() -> Server {
    let mut server = asked("REPLCONF capa eof capa psync2");
    server.resume(&replid());
    server.take_output();
    server
}

#[test]
fn what_replicas_of_each_version_say_is_understood() {
    // What Redis 6.2 and 7, Redis 8 and Valkey 9 send.
    for (words, capabilities, version) in [
        ("capa eof capa psync2", &[][..], None),
        ("capa eof capa psync2 capa rdb-channel-repl", &["rdb-channel-repl"], None),
        (
            "capa eof capa psync2 capa dual-channel capa skip-rdb-checksum version 9.1.2",
            &["dual-channel", "skip-rdb-checksum"],
            Some("9.1.2"),
        ),
    ] {
        let mut server = open();
        assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
        assert_eq!(answer(&mut server, "REPLCONF listening-port 6380"), "+OK\r\n");
        assert_eq!(answer(&mut server, "REPLCONF ip-address replica.example"), "+OK\r\n");
        assert_eq!(answer(&mut server, &format!("REPLCONF {words}")), "+OK\r\n");
        let peer = server.peer();
        assert!(peer.eof && peer.psync2);
        assert_eq!(peer.capabilities, capabilities);
        assert_eq!(peer.listening_port, Some(6380));
        assert_eq!(peer.ip_address.as_deref(), Some("replica.example"));
        assert_eq!(peer.version.as_deref(), version);
    }
}

#[test]
fn options_that_would_change_the_payload_are_refused() {
    for option in
        ["rdb-only 1", "rdb-filter-only functions", "rdb-channel 1", "set-rdb-client-id 7", "main-ch-client-id 7"]
    {
        let said = answer(&mut open(), &format!("REPLCONF {option}"));
        assert!(said.starts_with("-ERR REPLCONF") && said.contains("not supported here"), "{said}");
    }
    assert_eq!(answer(&mut open(), "REPLCONF rdb-only 0"), "+OK\r\n");
    assert_eq!(answer(&mut open(), "REPLCONF colour blue"), "-ERR Unrecognized REPLCONF option: colour\r\n");
    assert_eq!(
        answer(&mut open(), "REPLCONF set-cluster-node-id x"),
        "-ERR This instance has cluster support disabled\r\n"
    );
    assert_eq!(answer(&mut open(), "REPLCONF capa"), "-ERR syntax error\r\n");
    assert_eq!(
        answer(&mut open(), "REPLCONF listening-port 65536"),
        "-ERR value is not an integer or out of range\r\n"
    );
}

#[test]
fn other_commands_are_unknown_and_the_connection_goes_on() {
    let mut server = open();
    assert_eq!(answer(&mut server, "HELLO 3"), "-ERR unknown command 'HELLO'\r\n");
    assert_eq!(answer(&mut server, "SYNC"), "-ERR SYNC is not supported here; use PSYNC\r\n");
    assert_eq!(answer(&mut server, "PSYNC ?"), "-ERR unknown command 'PSYNC'\r\n");
    assert_eq!(answer(&mut server, "PSYNC ? x"), "-ERR value is not an integer or out of range\r\n");
    assert!(answer(&mut server, "PSYNC ? -1 FAILOVER").starts_with("-ERR PSYNC FAILOVER"));
    assert_eq!(answer(&mut server, "ping"), "+PONG\r\n");
}

#[test]
fn a_peer_that_must_authenticate_gets_no_other_answer_before() {
    let with = |user: Option<&str>| {
        let access = Access::User { name: user.map(Into::into), password: "secret".into() };
        Server::new(Options { access })
    };
    let denied = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    let mut server = with(Some("repl"));
    for command in ["PING", "REPLCONF capa eof", "PSYNC ? -1", "HELLO"] {
        assert_eq!(answer(&mut server, command), "-NOAUTH Authentication required.\r\n");
    }
    for wrong in ["AUTH secret", "AUTH repl secrex", "AUTH repl secret2", "AUTH other secret"] {
        assert_eq!(answer(&mut server, wrong), denied, "{wrong}");
    }
    assert_eq!(server.poll_event(), None);
    assert_eq!((server.is_authenticated(), server.refused_logins()), (false, 4));
    assert_eq!(answer(&mut server, "AUTH repl secret"), "+OK\r\n");
    assert!(server.is_authenticated());
    assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
    assert_eq!(answer(&mut with(None), "AUTH secret"), "+OK\r\n");
    assert_eq!(answer(&mut with(None), "AUTH default secret"), "+OK\r\n");
    assert_eq!(answer(&mut with(None), "AUTH"), "-ERR wrong number of arguments for 'auth' command\r\n");
}

#[test]
fn a_secret_is_accepted_under_any_user_name_and_nothing_else_is() {
    let guarded = || Server::new(Options { access: Access::Secret("5ec4e7".into()) });
    for right in ["AUTH 5ec4e7", "AUTH default 5ec4e7", "AUTH masteruser 5ec4e7"] {
        let mut server = guarded();
        assert_eq!(answer(&mut server, right), "+OK\r\n", "{right}");
        assert_eq!(answer(&mut server, "PING"), "+PONG\r\n");
    }
    let mut server = guarded();
    for wrong in ["AUTH 5ec4e", "AUTH 5ec4e77", "AUTH 5ec4e7 default", "AUTH \"\"", "AUTH default \"\""] {
        let said = answer(&mut server, wrong);
        assert!(said.starts_with("-WRONGPASS") || said.starts_with("-ERR"), "{wrong}: {said}");
    }
    server.handle_input(b"*2\r\n$4\r\nAUTH\r\n$0\r\n\r\n").unwrap();
    assert!(server.take_output().starts_with(b"-WRONGPASS"));
    assert_eq!(answer(&mut server, "PSYNC ? -1"), "-NOAUTH Authentication required.\r\n");
    assert_eq!(answer(&mut server, "REPLCONF capa eof"), "-NOAUTH Authentication required.\r\n");
    assert_eq!(server.poll_event(), None);
    assert!(!server.peer().eof, "facts of an unauthenticated peer are not kept");
}

#[test]
fn without_a_requirement_any_password_is_accepted() {
    assert_eq!(answer(&mut open(), "AUTH whatever"), "+OK\r\n");
    assert_eq!(answer(&mut open(), "AUTH who whatever"), "+OK\r\n");
}

#[test]
fn a_full_resync_is_announced_sent_and_followed_by_the_stream() {
    let mut server = asked("REPLCONF capa eof capa psync2");
    server.keep_alive();
    server.keep_alive();
    server.full_resync(&replid(), 100);
    assert_eq!(server.take_output(), format!("\n+FULLRESYNC {REPLID} 100\r\n").as_bytes());
    server.keep_alive();
    assert_eq!(server.take_output(), b"\n");
    server.payload(&Payload::Mark([b'm'; 40]));
    server.keep_alive();
    assert_eq!(server.take_output(), format!("$EOF:{}\r\n", "m".repeat(40)).as_bytes());
    server.handle_input(b"\n\n*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n$3\r\n100\r\n").unwrap();
    assert_eq!(server.poll_event(), Some(Event::Ack { offset: 100, aof: None }));
    assert_eq!(server.take_output(), b"");
}

#[test]
fn a_partial_resync_names_the_history_to_replicas_that_understand_it() {
    for (before, said) in
        [("REPLCONF capa psync2", format!("+CONTINUE {REPLID}\r\n")), ("PING", "+CONTINUE\r\n".to_owned())]
    {
        let mut server = asked(before);
        server.resume(&replid());
        assert_eq!(server.take_output(), said.as_bytes());
    }
}

#[test]
fn the_requested_history_and_offset_are_reported() {
    let mut server = open();
    server.handle_input(format!("PSYNC {REPLID} 101\r\n").as_bytes()).unwrap();
    assert_eq!(server.poll_event(), Some(Event::Psync { replid: Some(replid()), offset: 101 }));
}

#[test]
fn a_refused_replica_can_ask_again() {
    let mut server = asked("PING");
    server.refuse("no\r\nsnapshot");
    assert_eq!(server.take_output(), b"-ERR no  snapshot\r\n");
    assert_eq!(answer(&mut server, "SYNC"), "-ERR SYNC is not supported here; use PSYNC\r\n");
    server.handle_input(b"PSYNC ? -1\r\n").unwrap();
    server.full_resync(&replid(), 1);
    server.refuse("the source is gone");
    assert!(server.take_output().ends_with(b"-ERR the source is gone\r\n"));
}

#[test]
fn acknowledgements_are_merged_into_the_last_one() {
    let mut server = streaming();
    server.handle_input(b"REPLCONF ACK 5\r\nREPLCONF ack 7 FACK 6\r\n").unwrap();
    assert_eq!(server.poll_event(), Some(Event::Ack { offset: 7, aof: Some(6) }));
    assert_eq!(server.poll_event(), None);
    server.handle_input(b"REPLCONF ACK x\r\nREPLCONF unheard of\r\n").unwrap();
    assert_eq!(server.poll_event(), None);
    assert_eq!(server.take_output(), b"");
}

#[test]
fn a_client_that_sends_commands_after_psync_is_not_a_replica() {
    for mut server in [asked("PING"), streaming()] {
        let error = Error::OutOfTurn { command: "GET".into() };
        assert_eq!(server.handle_input(b"GET k\r\n"), Err(error.clone()));
        assert_eq!(server.handle_input(b"\n"), Err(error));
        // The driver may answer before it sees the error; the answer is ignored.
        server.full_resync(&replid(), 0);
        assert_eq!(server.take_output(), b"");
    }
}

#[test]
fn a_tls_replica_at_a_plain_listener_is_recognised() {
    assert_eq!(open().handle_input(b"\x16\x03\x01\x02\x00"), Err(Error::Tls));
}

#[test]
fn a_peer_that_never_reads_is_disconnected() {
    let mut server = open();
    let outcome = server.handle_input(&b"PING\n".repeat(20_000));
    assert_eq!(outcome, Err(Error::Flood));
    assert!(server.output.len() <= OUTPUT_BYTES_MAX + 100);
}

#[test]
#[should_panic(expected = "answers nothing")]
fn an_answer_without_a_question_is_a_bug() {
    open().resume(&replid());
}

#[test]
fn the_password_is_not_in_the_debug_text() {
    let accesses = [Access::User { name: None, password: "hunter2".into() }, Access::Secret("hunter2".into())];
    for access in accesses {
        assert!(!format!("{:?}", Server::new(Options { access })).contains("hunter2"));
    }
}
