//! The source's memory in the hands of the server's child: who may write it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use remora_lab::server::module_library;
use remora_lab::{Kind, Server, assert_same_data, fill_every_type, require};

use crate::kit::{Source, load, primary};
use crate::module::method;

/// The user `nobody`, and its group.
const OTHER_USER: u32 = 65534;

/// Packages run the server as a user of its own. Its child must write the table of a source that runs as another user.
fn a_server_of_another_user_walks(kind: Kind) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let library = folder.path().join("libremora_module.so");
    fs::copy(module_library().unwrap(), &library).unwrap();
    fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();

    let primary = primary(kind).config("loadmodule", library.display()).as_user(OTHER_USER).start().unwrap();
    let owner = fs::metadata(format!("/proc/{}", primary.pid())).unwrap().uid();
    assert_eq!(owner, OTHER_USER);
    fill_every_type(&mut primary.client().unwrap(), 41).unwrap();
    load(&primary, 50, 100_000);
    let replica = Server::start(kind).unwrap();
    let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk"]);
    source.replicate(&replica, &[]);
    assert_eq!(method(&mut source), "the module", "{}", source.agent.output());
    assert_same_data(&primary, &replica);
}

#[test]
fn a_redis_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::redis(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}

#[test]
fn a_valkey_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::valkey(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}
