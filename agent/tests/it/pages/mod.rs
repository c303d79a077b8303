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
}

/// A page on one host with nothing on it.
const ALONE: Scene = Scene { hosts: &["10.0.0.1"], servers: &Kind::ALL, before: &[], meanwhile: &[], values: &[] };

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
    migrate: "docs/how-to/migrate.md", MIGRATE;
    #[ignore = "long: make test-all"]
    roll_a_fleet: "docs/how-to/roll-a-fleet.md", ROLL_A_FLEET;
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
