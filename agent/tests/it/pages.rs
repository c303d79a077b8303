//! The README, the tutorial and the how-to pages: their commands are run as they are printed, and what they print is
//! compared with what came.
//!
//! A page says in comments, directly above a block, how it is run:
//!
//! | mark | the block |
//! |---|---|
//! | `<!-- at HOST -->` | runs at this address; of a block `text`: is what the agents print that stay there |
//! | `<!-- as UID -->` | runs as this user instead of root |
//! | `<!-- stays -->` | has a last command that stays, and is stopped at the end of the page |
//! | `<!-- not run: REASON -->` | is not run |
//!
//! Several stand in one comment with commas between. A block of the language `sh` is run, and each of its commands must
//! end with code 0. A block of the language `text` is what the block before it prints, but for [numbers][has].
//!
//! First come the pages: what each finds on its hosts before its first command, and what a reader fills in. Then
//! blocks, marks and the comparison, and at the end the hosts of a page.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;
use std::{fs, thread};

use tempfile::TempDir;

use crate::backup::bucket::Store;
use crate::kit::{LONG, at_once};
use remora_lab::process::spawn;
use remora_lab::server::Authority;
use remora_lab::server::{project_root, wait_until};
use remora_lab::{Host, Kind, Net, require, scratch};

/// What a page needs around its commands.
struct Scene {
    /// The addresses of its hosts. Blocks without a mark run at the first.
    hosts: &'static [&'static str],
    /// The servers which `redis-server` stands for, one after the other.
    servers: &'static [Kind],
    /// What is there before the first command: host and command.
    before: &'static [(&'static str, &'static str)],
    /// What happens besides: words of the page's command before whose first use it happens, host and command.
    meanwhile: &'static [(&'static str, &'static str, &'static str)],
    /// What a reader puts in the place of words of the page.
    values: &'static [(&'static str, &'static str)],
    /// The address of a store for objects that is called `minio`.
    store: Option<&'static str>,
}

/// A page on one host with nothing on it.
const ALONE: Scene =
    Scene { hosts: &["10.0.0.1"], servers: &Kind::ALL, before: &[], meanwhile: &[], values: &[], store: None };

/// A primary of Redis with some data, an empty Valkey, and a host from which they are called.
const TWO_FAMILIES: Scene = Scene {
    hosts: &["10.0.0.3", "10.0.0.1", "10.0.0.2"],
    servers: &[Kind::Redis7],
    before: &[
        ("10.0.0.1", "up redis-server 10.0.0.1 6379"),
        ("10.0.0.1", "remora load --server redis://10.0.0.1:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.2", "up valkey-server 10.0.0.2 6379"),
    ],
    ..ALONE
};

/// Runs a page.
fn play(page: &str, scene: &Scene) {
    let blocks = read(page).unwrap();
    let Some(()) = require::namespaces() else { return };
    let Some(_) = require::valkey() else { return };
    let kinds = scene.servers.iter().filter_map(|kind| require::kind(*kind));
    at_once(kinds, |kind| World::new(scene, kind).play(page, &blocks, scene));
}

/// A test for each page, and the list of them.
macro_rules! pages {
    ($($(#[$mark:meta])* $name:ident: $page:literal, $scene:expr;)*) => {
        const PAGES: &[&str] = &[$($page),*];
        $(
            #[test]
            $(#[$mark])*
            fn $name() {
                play($page, &$scene);
            }
        )*
    };
}

pages! {
    readme: "README.md", README;
    #[ignore = "long: make test-all"]
    tutorial: "docs/tutorial.md", ALONE;
    #[ignore = "long: make test-all"]
    add_replicas: "docs/how-to/add-replicas.md", ADD_REPLICAS;
    #[ignore = "long: make test-all"]
    back_up: "docs/how-to/back-up.md", BACK_UP;
    #[ignore = "long: make test-all"]
    cluster: "docs/how-to/cluster.md", CLUSTER;
    #[ignore = "long: make test-all"]
    migrate: "docs/how-to/migrate.md", MIGRATE;
    #[ignore = "long: make test-all"]
    roll_a_fleet: "docs/how-to/roll-a-fleet.md", ROLL_A_FLEET;
    #[ignore = "long: make test-all"]
    migrate_cluster: "docs/how-to/migrate-cluster.md", MIGRATE_CLUSTER;
    #[ignore = "long: make test-all"]
    rdma: "docs/how-to/rdma.md", RDMA;
    #[ignore = "long: make test-all"]
    sentinel: "docs/how-to/sentinel.md", SENTINEL;
    #[ignore = "long: make test-all"]
    snapshot_file: "docs/how-to/snapshot-file.md", SNAPSHOT_FILE;
    systemd: "docs/how-to/systemd.md", SYSTEMD;
}

const README: Scene = TWO_FAMILIES;

const ADD_REPLICAS: Scene = Scene {
    hosts: &["10.0.0.5", "10.0.0.9"],
    before: &[
        ("10.0.0.5", "up redis-server 10.0.0.5 6379"),
        ("10.0.0.5", "remora load --server redis://10.0.0.5:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.9", "up redis-server 10.0.0.9 6379"),
    ],
    ..ALONE
};

/// A primary with a source beside it. A client writes two values, with some seconds between them.
const BACK_UP: Scene = Scene {
    hosts: &["10.0.0.5", "10.0.0.20"],
    store: Some("10.0.0.20"),
    before: &[
        ("10.0.0.5", "up redis-server 10.0.0.5 6379"),
        ("10.0.0.5", "remora load --server redis://10.0.0.5:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.5", "mkdir /etc/remora && remora token new /etc/remora/token"),
        (
            "10.0.0.5",
            "remora source --server redis://10.0.0.5:6379 --listen 10.0.0.5:7379 --token-file /etc/remora/token \
             --tune-server --log-level warn &",
        ),
    ],
    meanwhile: &[(
        "remora restore",
        "10.0.0.5",
        "commands() {
            remora restore s3://backups/orders --s3-endpoint https://minio:9000 \
                --s3-credentials-file /etc/remora/s3-keys 2>&1 | sed -n 's/^commands *\\([0-9]*\\) .*/\\1/p'
        }
        # More often than the primary says PING meanwhile, which counts too.
        for _ in {1..20}; do redis-cli -h 10.0.0.5 set greeting hello; done
        until [[ $(commands) -ge 20 ]]; do sleep 1; done
        before=$(commands); sleep 1.1; date -u +%Y-%m-%dT%H:%M:%SZ > moment; sleep 1.1
        for _ in {1..20}; do redis-cli -h 10.0.0.5 set greeting overwritten; done
        until [[ $(commands) -ge $((before + 20)) ]]; do sleep 1; done",
    )],
    values: &[
        ("aws_access_key_id = …", "aws_access_key_id = the-id"),
        ("aws_secret_access_key = …", "aws_secret_access_key = the-secret"),
        ("2026-11-28T13:21:34Z", "$(cat moment)"),
    ],
    ..ALONE
};

/// Three primaries and two new nodes, of which the page has the commands of one each. Without a terminal a question is
/// answered by `--yes`.
const CLUSTER: Scene = Scene {
    hosts: &["10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.9", "10.0.0.10"],
    before: &[
        ("10.0.0.5", "up redis-server 10.0.0.5 6379 --cluster-enabled yes"),
        ("10.0.0.6", "up redis-server 10.0.0.6 6379 --cluster-enabled yes"),
        ("10.0.0.7", "up redis-server 10.0.0.7 6379 --cluster-enabled yes"),
        ("10.0.0.5", "redis-cli --cluster create 10.0.0.5:6379 10.0.0.6:6379 10.0.0.7:6379 --cluster-yes"),
        (
            "10.0.0.5",
            "for n in 5 6 7; do until redis-cli -h 10.0.0.$n cluster info | grep -q state:ok; do sleep 0.1; done; done",
        ),
        ("10.0.0.9", "BY=999 up redis-server 10.0.0.9 6379 --cluster-enabled yes"),
        ("10.0.0.10", "BY=999 up redis-server 10.0.0.10 6379 --cluster-enabled yes"),
        ("10.0.0.5", "remora token new token"),
        ("10.0.0.6", "remora source --server redis://10.0.0.6:6379 --listen 10.0.0.6:7379 --token-file token &"),
        ("10.0.0.7", "remora source --server redis://10.0.0.7:6379 --listen 10.0.0.7:7379 --token-file token &"),
        (
            "10.0.0.10",
            "remora intercept add --server-uid 999 --agent-uid 0
            remora attend --server redis://127.0.0.1:6379 --token-file token --source 10.0.0.5:7379 \
                --sources 10.0.0.6:7379,10.0.0.7:7379 &",
        ),
    ],
    values: &[("--add ", "--yes --add ")],
    ..ALONE
};

/// Old nodes of Redis and new ones of Valkey. The page has the commands of one each, and goes back or to the end.
const MIGRATE_CLUSTER: Scene = Scene {
    hosts: &["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.1.1", "10.0.1.2", "10.0.1.3"],
    servers: &[Kind::Redis7],
    before: &[
        ("10.0.0.1", "up redis-server 10.0.0.1 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
        ("10.0.0.2", "up redis-server 10.0.0.2 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
        ("10.0.0.3", "up redis-server 10.0.0.3 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
        ("10.0.0.1", "redis-cli --cluster create 10.0.0.1:6379 10.0.0.2:6379 10.0.0.3:6379 --cluster-yes"),
        (
            "10.0.0.1",
            "for n in 1 2 3; do until redis-cli -h 10.0.0.$n cluster info | grep -q state:ok; do sleep 0.1; done; done",
        ),
        ("10.0.1.1", "BY=999 up valkey-server 10.0.1.1 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
        ("10.0.1.2", "BY=999 up valkey-server 10.0.1.2 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
        ("10.0.1.3", "BY=999 up valkey-server 10.0.1.3 6379 --cluster-enabled yes --cluster-node-timeout 5000"),
    ],
    meanwhile: &[
        (
            "remora intercept",
            "10.0.0.2",
            "remora source --server redis://127.0.0.1:6379 --listen 10.0.0.2:7379 --token-file token &",
        ),
        (
            "remora intercept add",
            "10.0.0.3",
            "remora source --server redis://127.0.0.1:6379 --listen 10.0.0.3:7379 --token-file token &",
        ),
        ("remora cluster", "10.0.1.2", MIGRATE_ATTEND),
        ("remora cluster migrate", "10.0.1.3", MIGRATE_ATTEND),
        (
            "--forget",
            "10.0.0.1",
            // Soon after the way back, nodes do not vote yet (code 18).
            "until remora cluster migrate --server redis://10.0.0.1:6379 --source-port 7379 --token-file token \
             --to 10.0.1.1:6379,10.0.1.2:6379,10.0.1.3:6379 --yes; do [[ $? = 18 ]] || exit; sleep 1; done",
        ),
    ],
    values: &[("10.0.1.3:6379", "10.0.1.3:6379 --yes")],
    ..ALONE
};

const MIGRATE_ATTEND: &str = "remora intercept add --server-uid 999 --agent-uid 0
    remora attend --server redis://127.0.0.1:6379 --token-file token --convert --source 10.0.0.1:7379 \
        --sources 10.0.0.2:7379,10.0.0.3:7379 &";

/// Two hosts without cards, where all but the sync works over TCP.
const RDMA: Scene = Scene {
    hosts: &["10.0.0.5", "10.0.0.9"],
    before: &[("10.0.0.5", "up redis-server 10.0.0.5 6379"), ("10.0.0.9", "up redis-server 10.0.0.9 6379")],
    ..ALONE
};

/// A Sentinel of the group whose primary is 10.0.0.4. It is there when it knows the replica and the other two.
const SENTINEL_STARTS: &str = "file=$(mktemp)
    printf 'port 26379\nprotected-mode no\nsentinel monitor mymaster 10.0.0.4 6379 2\n' > $file
    redis-server $file --sentinel --daemonize yes --logfile /dev/null";

const SENTINEL_KNOWS: &str =
    "until redis-cli -p 26379 info sentinel | grep -q 'slaves=1,sentinels=3'; do sleep 0.1; done";

const SENTINEL: Scene = Scene {
    hosts: &["10.0.0.9", "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"],
    before: &[
        ("10.0.0.4", "up redis-server 10.0.0.4 6379"),
        ("10.0.0.4", "remora load --server redis://10.0.0.4:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.5", "up redis-server 10.0.0.5 6379 --replicaof 10.0.0.4 6379"),
        ("10.0.0.9", "up redis-server 10.0.0.9 6379"),
        ("10.0.0.5", "remora ready --server redis://10.0.0.5:6379 --timeout 1m"),
        ("10.0.0.1", SENTINEL_STARTS),
        ("10.0.0.2", SENTINEL_STARTS),
        ("10.0.0.3", SENTINEL_STARTS),
        ("10.0.0.1", SENTINEL_KNOWS),
        ("10.0.0.2", SENTINEL_KNOWS),
        ("10.0.0.3", SENTINEL_KNOWS),
        ("10.0.0.5", "remora token new token"),
    ],
    ..ALONE
};

/// A cluster of one node, with a source beside it. Its second half begins with the first half's server ended. Debian has
/// the program that checks files for Redis alone.
const SNAPSHOT_FILE: Scene = Scene {
    hosts: &["10.0.0.9", "10.0.0.5"],
    servers: &[Kind::Redis7],
    before: &[
        ("10.0.0.5", "up redis-server 10.0.0.5 6379 --cluster-enabled yes"),
        ("10.0.0.5", "redis-cli -h 10.0.0.5 cluster addslotsrange 0 16383"),
        ("10.0.0.5", "until redis-cli -h 10.0.0.5 cluster info | grep -q state:ok; do sleep 0.1; done"),
        ("10.0.0.5", "remora load --server redis://10.0.0.5:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.5", "remora token new token"),
        (
            "10.0.0.5",
            "remora source --server redis://10.0.0.5:6379 --listen 10.0.0.5:7379 --token-file token --tune-server \
             --log-level warn &",
        ),
        ("10.0.0.9", "printf 'protected-mode no\nsave \"\"\n' > /etc/redis.conf"),
    ],
    meanwhile: &[("--write-nodes-conf", "10.0.0.9", "redis-cli shutdown nosave; rm -r /data/*")],
    ..ALONE
};

/// What needs no systemd.
const SYSTEMD: Scene = Scene { servers: &[Kind::Redis7], ..ALONE };

/// The restart is the operator's.
const ROLL_A_FLEET: Scene = Scene {
    hosts: &["10.0.0.5", "10.0.0.9"],
    before: &[
        ("10.0.0.5", "up redis-server 10.0.0.5 6379"),
        ("10.0.0.5", "remora load --server redis://10.0.0.5:6379 --keys 20 --value-size 1MiB"),
        ("10.0.0.9", "BY=999 up redis-server 10.0.0.9 6379 --replicaof 10.0.0.5 6379"),
    ],
    meanwhile: &[(
        "remora ready",
        "10.0.0.9",
        "redis-cli -h 10.0.0.9 shutdown nosave; BY=999 up redis-server 10.0.0.9 6379 --replicaof 10.0.0.5 6379",
    )],
    ..ALONE
};

/// By hand it begins with a new server that is empty again.
const MIGRATE: Scene = Scene {
    meanwhile: &[(
        "remora replica --server",
        "10.0.0.2",
        "redis-cli -h 10.0.0.2 replicaof no one && redis-cli -h 10.0.0.2 flushall",
    )],
    ..TWO_FAMILIES
};

#[test]
fn each_block_of_each_page_is_run_or_says_why_not() {
    let mut pages = vec!["README.md".to_owned(), "docs/tutorial.md".to_owned()];
    for entry in fs::read_dir(project_root().join("docs/how-to")).unwrap() {
        pages.push(format!("docs/how-to/{}", entry.unwrap().file_name().to_str().unwrap()));
    }
    let mut wrong = Vec::new();
    for page in &pages {
        match read(page) {
            Err(fault) => wrong.push(fault),
            Ok(blocks) => {
                let is_run = blocks.iter().any(|block| !matches!(block.use_, Use::NotRun(_)));
                if is_run && !PAGES.contains(&&**page) {
                    wrong.push(format!("{page} has commands and no test: add it to `pages!`"));
                }
            }
        }
    }
    wrong
        .extend(PAGES.iter().filter(|page| !pages.iter().any(|there| there == *page)).map(|page| format!("no {page}")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

// A page as blocks: what is run, where, and what it prints.

/// A fenced block of a page.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    /// The line of its fence in the page, counted from 1.
    line: usize,
    text: String,
    use_: Use,
    /// The host that its mark names: where it is run, or whose agents print it.
    host: Option<String>,
    /// The user who runs it; `None` for root.
    user: Option<u32>,
}

/// What becomes of a block.
#[derive(Clone, Debug, PartialEq)]
enum Use {
    /// Its commands end one after the other.
    Run,
    /// The last of its commands stays until the page is over.
    Stays,
    /// It is what the block before it prints.
    Output,
    /// It is not run, for this reason.
    NotRun(String),
}

/// The blocks of a page of the project, or what is wrong with one.
fn read(page: &str) -> Result<Vec<Block>, String> {
    let text = fs::read_to_string(project_root().join(page)).map_err(|error| format!("{page}: {error}"))?;
    blocks(&text).map_err(|(line, fault)| format!("{page}:{line}: {fault}"))
}

fn blocks(text: &str) -> Result<Vec<Block>, (usize, String)> {
    let (mut blocks, mut marks) = (Vec::<Block>::new(), Vec::new());
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(mark) = line.strip_prefix("<!-- ").and_then(|mark| mark.strip_suffix(" -->")) {
            marks.push(mark);
        } else if let Some(language) = line.trim_start().strip_prefix("```") {
            let inside = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```");
            let text: String = inside.flat_map(|line| [line, "\n"]).collect();
            let block = Block { line: at + 1, text, use_: Use::Run, host: None, user: None };
            let block = block.marked(language, &marks, blocks.last()).map_err(|fault| (at + 1, fault))?;
            blocks.push(block);
            marks.clear();
        } else {
            marks.clear();
        }
    }
    Ok(blocks)
}

impl Block {
    fn marked(mut self, language: &str, marks: &[&str], before: Option<&Block>) -> Result<Block, String> {
        for mark in marks {
            if let Some(reason) = mark.strip_prefix("not run:") {
                if reason.trim().is_empty() {
                    return Err("`not run` needs a reason".into());
                }
                self.use_ = Use::NotRun(reason.trim().into());
                return Ok(self);
            }
            for word in mark.split(", ") {
                match word.split_once(' ') {
                    None if word == "stays" => self.use_ = Use::Stays,
                    Some(("at", host)) => self.host = Some(host.into()),
                    Some(("as", user)) => self.user = Some(user.parse().map_err(|_| format!("{user} is no user id"))?),
                    _ => return Err(format!("the mark {word:?} is not known")),
                }
            }
        }
        match (language, before) {
            ("sh", _) => {}
            ("text", Some(Block { use_: Use::NotRun(reason), .. })) if self.host.is_none() => {
                self.use_ = Use::NotRun(reason.clone());
            }
            ("text", Some(_)) => self.use_ = Use::Output,
            _ => {
                return Err("a block begins with ```sh and is run, or with ```text and is what the block before it \
                            prints, or has the mark <!-- not run: REASON -->"
                    .into());
            }
        }
        Ok(self)
    }

    /// Its commands as a shell reads them, each with its line in the page.
    fn commands(&self) -> Vec<(usize, String)> {
        let (mut commands, mut lines) = (Vec::new(), (self.line + 1..).zip(self.text.lines()));
        while let Some((at, line)) = lines.next() {
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let (mut command, mut last) = (line.to_owned(), line);
            while last.ends_with('\\') {
                let Some((_, next)) = lines.next() else { break };
                last = next;
                command += &format!("\n{next}");
            }
            if let Some(end) = end_of_document(last) {
                for (_, next) in lines.by_ref() {
                    command += &format!("\n{next}");
                    if next == end {
                        break;
                    }
                }
            }
            commands.push((at, command));
        }
        commands
    }
}

/// The word that ends the document which begins in the next line (`cat > FILE <<'END'`).
fn end_of_document(line: &str) -> Option<String> {
    let (_, word) = line.split_once("<<")?;
    let word: String = word.trim_start_matches('\'').chars().take_while(char::is_ascii_alphanumeric).collect();
    (!word.is_empty()).then_some(word)
}

/// What is compared of a line: its words, with each number, id and time as `0`, each unit as `size` or `time`, and each
/// family of servers as `Server`. Addresses stay as they are.
fn normal(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let after_number = words.last().is_some_and(|before| before.ends_with('0'));
        words.push(if after_number { unit(word) } else { None }.unwrap_or_else(|| normal_word(word)));
    }
    words.join(" ")
}

/// The kind of a unit, with what stands behind it.
fn unit(word: &str) -> Option<String> {
    let length = word.find(|letter: char| !letter.is_alphabetic()).unwrap_or(word.len());
    let (unit, rest) = word.split_at(length);
    match unit {
        "B" | "KiB" | "MiB" | "GiB" | "TiB" => Some(format!("size{rest}")),
        "µs" | "ms" | "s" | "min" | "h" => Some(format!("time{rest}")),
        _ => None,
    }
}

fn normal_word(word: &str) -> String {
    let value = word.rsplit('=').next().unwrap_or(word).trim_matches(|letter: char| !letter.is_alphanumeric());
    let host = value.rsplit_once("://").map_or(value, |(_, rest)| rest);
    if host.split(':').next().is_some_and(|host| host.parse::<std::net::Ipv4Addr>().is_ok()) {
        return word.to_owned();
    }
    let mut text = String::new();
    let mut rest = word;
    while let Some(letter) = rest.chars().next() {
        let length = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (run, behind) = rest.split_at(length.max(letter.len_utf8()));
        rest = behind;
        let is_id = run.len() >= ID_DIGITS && run.bytes().all(|digit| digit.is_ascii_hexdigit());
        match run {
            "Redis" | "Valkey" | "redis" | "valkey" => text += "Server",
            _ if is_id => text += "0",
            _ => {
                for letter in run.chars() {
                    let letter = if letter.is_ascii_digit() { '0' } else { letter };
                    if letter != '0' || !text.ends_with('0') {
                        text.push(letter);
                    }
                }
            }
        }
    }
    while text.contains("0.0") {
        text = text.replace("0.0", "0");
    }
    text
}

/// Replication ids, names of backups: words of at least 8 hexadecimal digits.
const ID_DIGITS: usize = 8;

/// Stands in a page for any lines, and at the end of a line for any words.
const ANYTHING: &str = "…";

/// Whether `said` has the lines that the page expects, one after the other. Before and behind them may be others, and so
/// may where the page has `…`. A line of the log may be without its time in the page.
fn has(said: &str, expected: &str) -> bool {
    let said: Vec<String> = said.lines().map(normal).filter(|line| !line.is_empty()).collect();
    let mut rest = &said[..];
    let mut expected = expected.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    while expected.peek().is_some() {
        let part: Vec<&str> = expected.by_ref().take_while(|line| *line != ANYTHING).collect();
        if part.is_empty() {
            continue;
        }
        let Some(at) = rest.windows(part.len()).position(|lines| lines.iter().zip(&part).all(is_line)) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    true
}

fn is_line((said, expected): (&String, &&str)) -> bool {
    let (begun, open) = expected.strip_suffix(ANYTHING).map_or((*expected, false), |begun| (begun, true));
    let wanted = normal(begun);
    let said = match ["INFO ", "WARN "].into_iter().find(|level| wanted.starts_with(level)) {
        Some(level) => said.find(level).map_or(&**said, |at| &said[at..]),
        None => said,
    };
    if open { said.starts_with(&wanted) } else { said == wanted }
}

#[test]
fn blocks_have_marks_and_documents_are_one_command() {
    let page = "Words.\n\n<!-- at 10.0.0.5, stays -->\n<!-- as 998 -->\n```sh\n# remark\ncat > a <<'END'\nb\nEND\n\nrun \\\n  \
                more\n```\n\n```text\nsaid\n```\n<!-- not run: needs a card -->\n```\nrdma\n```\n";
    let blocks = blocks(page).unwrap();
    let first = &blocks[0];
    assert_eq!((first.line, first.host.as_deref(), first.user), (5, Some("10.0.0.5"), Some(998)));
    assert_eq!(first.commands(), [(7, "cat > a <<'END'\nb\nEND".into()), (11, "run \\\n  more".into())]);
    let uses: Vec<Use> = blocks.into_iter().map(|block| block.use_).collect();
    assert_eq!(uses, [Use::Stays, Use::Output, Use::NotRun("needs a card".into())]);
}

#[test]
fn a_block_without_a_mark_or_a_language_is_refused() {
    for (page, line, fault) in [
        ("```\nls\n```\n", 1, "begins with ```sh"),
        ("```text\nsaid\n```\n", 1, "begins with ```sh"),
        ("\n<!-- not run: -->\n```\nls\n```\n", 3, "a reason"),
        ("<!-- on 10.0.0.1 -->\n```sh\nls\n```\n", 2, "not known"),
    ] {
        let (at, said) = blocks(page).unwrap_err();
        assert!(at == line && said.contains(fault), "{page}: {at}: {said}");
    }
}

#[test]
fn output_is_compared_without_its_numbers() {
    let said = "noise\n2026-11-29T04:00:00Z  INFO source ready listening=10.0.0.5:7379 memory=2 GiB\nnoise\n\
                replica of 10.0.0.5:6379 at bbf17eefbd02111a7f9c7e96cabf2ed1c5f57dba:14\n  transfer  3.715 s  20.5 MiB/s\nend";
    assert!(has(said, "INFO source ready listening=10.0.0.5:7379 memory=512 MiB\n"));
    assert!(has(
        said,
        "replica of 10.0.0.5:6379 at 0bf17eefbd02111a7f9c7e96cabf2ed1c5f57dba:7\ntransfer 0.2 ms 1 GiB/s"
    ));
    assert!(has(said, "INFO source ready …\n…\nend\n"));
    for wrong in ["INFO source ready", "replica of 10.0.0.9:6379 at 0:14", "transfer 1 MiB 1 MiB/s", "end\nnoise"] {
        assert!(!has(said, wrong), "{wrong}");
    }
    assert_eq!(normal("s3://b/20261128T132128Z-17362e90-0: of Redis 7.0.15"), "s0://b/0T0Z-0-0: of Server 0");
}

// The hosts of a page: each a network namespace with the page's address, and a shell in it.
//
// ```text
//   this machine                     a page's hosts
//   /usr, /dev ── as they are ─────▶ /       one folder as the root of all of a page's hosts: what is copied
//   /etc ──────── a copy ──────────▶ /etc    to each host there is copied to all here
//   remora, the servers ── one ────▶ /opt/bin
// ```
//
// The shells see nothing else of this machine's files, and have process namespaces of their own: servers that a page
// starts as daemons end with their shell.

/// The hosts of one page, and what has been said there.
struct World {
    /// The one in which blocks without a mark are run first.
    shells: Vec<Shell>,
    staying: Vec<Staying>,
    /// Everything, for the message of a failure.
    transcript: String,
    scripts: usize,
    /// What of [`Scene::meanwhile`] has happened.
    happened: BTreeSet<&'static str>,
    store: Option<Store>,
    folder: TempDir,
    _net: Net,
}

/// A command that stays.
struct Staying {
    host: String,
    command: String,
    pid: String,
    said: PathBuf,
}

/// What the last block has printed.
enum Said {
    Nothing,
    Text(String),
    Staying(usize),
}

impl World {
    fn new(scene: &Scene, kind: Kind) -> World {
        let (folder, net) = (scratch::folder("page").unwrap(), Net::new().unwrap());
        let root = folder.path().join("root");
        // Every user of the page's hosts may pass.
        for (place, mode) in [("", 0o755), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777), ("opt", 0o755)] {
            make(&root.join(place), mode);
        }
        for place in ["usr", "dev", "sys", "proc", "run", "mnt", "opt/bin", "var/lib"] {
            make(&root.join(place), 0o755);
        }
        make(&root.join("root"), 0o755); // users read tokens there
        for link in ["bin", "sbin", "lib", "lib64"] {
            let (from, to) = (Path::new("/").join(link), root.join(link));
            match fs::read_link(&from) {
                Ok(target) => std::os::unix::fs::symlink(target, to).unwrap(),
                Err(_) if from.is_dir() => panic!("/{link} is no link into /usr, as on Debian since 12"),
                Err(_) => {}
            }
        }
        let copied = Command::new("cp").args(["-a", "/etc"]).arg(root.join("etc")).status().unwrap();
        assert!(copied.success(), "cp -a /etc: {copied}");
        let programs = [
            ("remora", PathBuf::from(env!("CARGO_BIN_EXE_remora"))),
            ("redis-server", kind.binary().unwrap()),
            ("valkey-server", Kind::Valkey9.binary().unwrap_or_default()),
        ];
        let there = programs.iter().filter(|(_, path)| path.is_file());
        there.clone().for_each(|(name, _)| fs::write(root.join("opt/bin").join(name), "").unwrap());
        let binds: String = there
            .map(|(name, path)| {
                format!("mount --bind '{}' opt/bin/{name}\n", fs::canonicalize(path).unwrap().display())
            })
            .collect();
        let shells = scene.hosts.iter().map(|address| Shell::start(&net, address, &root, &binds)).collect();
        let mut world = World {
            shells,
            staying: Vec::new(),
            transcript: String::new(),
            scripts: 0,
            happened: BTreeSet::new(),
            store: None,
            folder,
            _net: net,
        };
        if let Some(address) = scene.store {
            world.start_store(address);
        }
        for (host, command) in scene.before {
            world.run(host, None, command).unwrap_or_else(|fault| world.fails(&fault));
        }
        world
    }

    /// Starts a store for objects on the host of this address, which is called `minio` and whose authority all hosts trust.
    fn start_store(&mut self, address: &str) {
        let authority = Authority::new(self.folder.path(), "authority").unwrap();
        let tls = authority.sign("minio", &["minio"]).unwrap();
        let etc = self.folder.path().join("root/etc");
        let add = |name: &str, text: &str| {
            let mut file = fs::OpenOptions::new().append(true).open(etc.join(name)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        add("hosts", &format!("{address} minio\n"));
        add("ssl/certs/ca-certificates.crt", &fs::read_to_string(&authority.ca).unwrap());
        let store = Store::start();
        let host = self.shell(address).unwrap().host.clone();
        store.serve_at(host.within(|| TcpListener::bind(format!("{address}:9000"))).unwrap().unwrap(), &tls);
        self.store = Some(store);
    }

    /// Runs the blocks of a page, in order.
    fn play(mut self, page: &str, blocks: &[Block], scene: &Scene) {
        if let Err((line, fault)) = self.blocks(blocks, scene) {
            self.fails(&format!("{page}:{line}: {fault}"));
        }
        if let Err(fault) = self.end_staying() {
            self.fails(&format!("{page}: {fault}"));
        }
    }

    fn blocks(&mut self, blocks: &[Block], scene: &Scene) -> Result<(), (usize, String)> {
        let mut last = Said::Nothing;
        for block in blocks {
            let fault = |fault| (block.line, fault);
            match &block.use_ {
                Use::NotRun(_) => {}
                Use::Run | Use::Stays => last = self.commands(block, scene)?,
                Use::Output => self.compare(block, &last).map_err(fault)?,
            }
        }
        Ok(())
    }

    fn commands(&mut self, block: &Block, scene: &Scene) -> Result<Said, (usize, String)> {
        let host = block.host.clone().unwrap_or_else(|| scene.hosts[0].to_owned());
        let commands = block.commands();
        let mut text = String::new();
        for (number, (line, command)) in commands.iter().enumerate() {
            let fault = |fault| (*line, fault);
            for (part, host, other) in scene.meanwhile.iter().filter(|(part, ..)| command.contains(part)) {
                if self.happened.insert(part) {
                    self.run(host, None, other).map_err(|why| fault(format!("before {part:?}: {why}")))?;
                }
            }
            let placed = |text: String, (word, value): &(&str, &str)| text.replace(word, value);
            let command = scene.values.iter().fold(command.clone(), placed);
            if block.use_ == Use::Stays && number + 1 == commands.len() {
                return self.stay(&host, block.user, &command).map(Said::Staying).map_err(fault);
            }
            text += &self.run(&host, block.user, &command).map_err(fault)?;
        }
        Ok(Said::Text(text))
    }

    /// Compares what the page says with what the block before it, or the agents of the named host, have printed.
    fn compare(&self, block: &Block, last: &Said) -> Result<(), String> {
        let said = || match (last, &block.host) {
            (_, Some(host)) => {
                let there = self.staying.iter().filter(|staying| staying.host == *host);
                there.map(|staying| fs::read_to_string(&staying.said).unwrap_or_default()).collect()
            }
            (Said::Text(text), None) => text.clone(),
            (Said::Staying(number), None) => fs::read_to_string(&self.staying[*number].said).unwrap_or_default(),
            (Said::Nothing, None) => String::new(),
        };
        // What stays has time to print it.
        let limit = if matches!(last, Said::Text(_)) && block.host.is_none() { NOW } else { LONG };
        let waited = wait_until("what the page prints", limit, || {
            let said = said();
            Ok(if has(&said, &block.text) { Ok(()) } else { Err(said) })
        });
        waited.map_err(|_| format!("the page prints\n{}but it was\n{}", block.text, said()))
    }

    /// Runs a command on that host to its end, which must be a good one, and returns what it prints.
    fn run(&mut self, host: &str, user: Option<u32>, command: &str) -> Result<String, String> {
        let script = self.script(user, command)?;
        let shell = self.shell(host)?;
        let done = shell.ask(&format!(". {script} </dev/null; printf '\\001%d\\n' $?"));
        let (said, code) = done.unwrap_or_else(|said| (said, "no end within two minutes".into()));
        let _ = writeln!(self.transcript, "{host}$ {command}\n{said}"); // a string takes everything
        // What a page kills by `timeout` ends so.
        let wanted = if command.starts_with("timeout -s KILL") { "137" } else { "0" };
        if code == wanted { Ok(said) } else { Err(format!("`{command}` ended with {code}, and not with {wanted}")) }
    }

    fn stay(&mut self, host: &str, user: Option<u32>, command: &str) -> Result<usize, String> {
        let script = self.script(user, &format!("exec {command}"))?;
        let file = format!("{script}.said");
        let said = self.folder.path().join("root").join(file.trim_start_matches('/'));
        let shell = self.shell(host)?;
        let (_, pid) = shell.ask(&format!("( . {script} ) </dev/null >{file} 2>&1 &\nprintf '\\001%d\\n' $!"))?;
        let _ = writeln!(self.transcript, "{host}$ {command}   # stays");
        self.staying.push(Staying { host: host.into(), command: command.into(), pid, said });
        Ok(self.staying.len() - 1)
    }

    /// Stops what stays, the last first, as an operator does.
    fn end_staying(&mut self) -> Result<(), String> {
        for number in (0..self.staying.len()).rev() {
            let Staying { host, command, pid, .. } = &self.staying[number];
            let (host, command, pid) = (host.clone(), command.clone(), pid.clone());
            let (_, code) = self.shell(&host)?.ask(&format!("kill {pid}; wait {pid}; printf '\\001%d\\n' $?"))?;
            if code != "0" {
                return Err(format!("`{command}` was stopped, and ended with {code}"));
            }
        }
        Ok(())
    }

    /// Writes a command into a file of all hosts, and returns the file's path there.
    fn script(&mut self, user: Option<u32>, command: &str) -> Result<String, String> {
        self.scripts += 1;
        let name = format!("/tmp/command-{}", self.scripts);
        let write = |name: &str, text: &str| {
            let path = self.folder.path().join("root").join(name.trim_start_matches('/'));
            fs::write(&path, format!("{text}\n")).map_err(|error| format!("{}: {error}", path.display()))
        };
        let Some(user) = user else { return write(&name, command).map(|()| name) };
        write(&format!("{name}.user"), command)?;
        let home = format!("/var/lib/user-{user}");
        let exec = if command.starts_with("exec ") { "exec " } else { "" };
        let as_user = format!("setpriv --reuid {user} --regid {user} --clear-groups bash {name}.user");
        write(&name, &format!("install -d -o {user} {home}\n{exec}env HOME={home} {as_user}")).map(|()| name)
    }

    fn shell(&mut self, host: &str) -> Result<&mut Shell, String> {
        let shell = self.shells.iter_mut().find(|shell| shell.address == host);
        shell.ok_or_else(|| format!("this page's test has no host {host}"))
    }

    #[track_caller]
    fn fails(&self, fault: &str) -> ! {
        let mut text = format!("{fault}\n\nWhat was run:\n{}", self.transcript);
        for Staying { host, command, said, .. } in &self.staying {
            let said = fs::read_to_string(said).unwrap_or_default();
            let _ = writeln!(text, "\n{host}: {command}\n{said}");
        }
        panic!("{text}");
    }
}

/// How long a command that has ended may take to print what it prints: its output is read by then.
const NOW: std::time::Duration = std::time::Duration::ZERO;

fn make(path: &Path, mode: u32) {
    fs::create_dir_all(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A shell of root on a host. It ends, with all that it started, when it is dropped.
struct Shell {
    address: String,
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    host: Host,
}

/// Its beginning. `$0` is the folder that becomes the root.
const BEGIN: &str = "set -e
exec 2>&1
cd \"$0\"
for folder in usr dev sys; do mount --rbind /$folder $folder; done
mount -o remount,bind,ro usr
mount -t proc proc proc
BINDS
exec chroot . /bin/bash --noprofile --norc";

/// What a page's preparation calls.
const WORDS: &str = r#"cd /root
# [BY=UID] up PROGRAM ADDRESS PORT [OPTION...]: starts a server that persists nothing, with a folder and a configuration
# file of its own, and waits until it answers.
up() {
    local folder=/var/lib/redis-$2-$3 by=(${BY:+setpriv --reuid $BY --regid $BY --clear-groups})
    install -d "$folder" && touch "$folder/redis.conf" && chown -R "${BY:-0}" "$folder" || return
    "${by[@]}" "$1" "$folder/redis.conf" --dir "$folder" --bind "$2" 127.0.0.1 --port "$3" --save '' --protected-mode no \
        --logfile log --daemonize yes "${@:4}" || return
    until redis-cli -h "$2" -p "$3" ping 2>/dev/null | grep -qE 'PONG|LOADING|MASTERDOWN'; do sleep 0.05; done
}"#;

impl Shell {
    fn start(net: &Net, address: &str, root: &Path, binds: &str) -> Shell {
        let host = net.host(address).unwrap();
        let mut ip = Command::new("ip");
        host.enter(ip.args(["address", "add", &format!("{address}/{NETWORK}"), "dev", "eth0"])).unwrap();
        let added = ip.output().unwrap();
        assert!(added.status.success(), "{address}: {}", String::from_utf8_lossy(&added.stderr));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &BEGIN.replace("BINDS\n", binds)]);
        command.arg(root).env_clear().env("HOME", "/root").env("NO_COLOR", "1");
        command.env("PATH", "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        host.enter(&mut command).unwrap();
        let mut process = spawn(command).unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if tell.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        let mut shell = Shell { address: address.into(), process, input, lines, host };
        shell.ask(&format!("{WORDS}\nprintf '\\001%d\\n' $?")).unwrap_or_else(|said| panic!("{address}: {said}"));
        shell
    }

    /// Sends lines of which the last prints the mark and a word, and returns what came before the mark, and the word. As
    /// an error what has come if no mark comes.
    fn ask(&mut self, lines: &str) -> Result<(String, String), String> {
        let deadline = Instant::now() + LONG;
        let mut said = String::new();
        if writeln!(self.input, "{lines}").is_err() {
            said = "the shell has ended\n".into();
        }
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            match line.split_once(MARK) {
                Some((rest, word)) => return Ok((said + rest, word.to_owned())),
                None => said += &format!("{line}\n"),
            }
        }
        Err(said)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.process.kill(); // its children are killed with it; it may have ended already
        let _ = self.process.wait();
    }
}

/// How a command's end is told from its output.
const MARK: char = '\u{1}';

/// The length of the network's prefix: all addresses of the pages are in 10.0.0.0/16.
const NETWORK: u8 = 16;
