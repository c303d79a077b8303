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
//! end with code 0. A block of the language `text` is what the block before it prints, but for [numbers][page::has].
//!
//! - [`page`]: blocks, marks, and the comparison. [`world`]: the hosts of a page.
//! - Here: the pages, what each finds on its hosts before its first command, and what a reader fills in.

mod page;
mod world;

use std::fs;

use remora_lab::server::project_root;
use remora_lab::{Kind, require};

use self::page::Use;
use self::world::World;
use crate::kit::at_once;

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
    let blocks = page::read(page).unwrap();
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
        match page::read(page) {
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
