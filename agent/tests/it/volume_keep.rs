//! `remora volume`: scrub, repair, grow, remove, and what status shows of them.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;

use remora_lab::require;
use serde_json::Value;

use crate::kit::{ends, says};
use crate::volume::{Scene, qemu_io};

const BLOCK: usize = 4096;

/// Changes a byte of a block in the memory of a process that consists of this byte only.
#[track_caller]
fn damage(pid: u32, byte: u8) {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps")).unwrap());
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    for line in maps.lines().map(Result::unwrap).filter(|line| line.contains("/memfd:remora-volume")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut block = [0; BLOCK];
        for at in (from..to).step_by(BLOCK) {
            memory.read_exact_at(&mut block, at).unwrap();
            if block == [byte; BLOCK] {
                return memory.write_all_at(&[byte + 1], at + 7).unwrap();
            }
        }
    }
    panic!("no block of {byte} in the memory of process {pid}");
}

fn status(scene: &Scene, file: &str) -> Value {
    let mut status = scene.start(&["status", file, "--json"]);
    ends(&mut status, 0);
    serde_json::from_str(&status.stdout()).unwrap()
}

fn states(scene: &Scene, file: &str) -> Vec<String> {
    let copies = status(scene, file)["copies"].as_array().unwrap().clone();
    copies.iter().map(|copy| copy["state"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn damage_is_found_by_a_scrub_and_repaired_by_the_open_volume_or_by_repair() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    let well = scene.end(&["scrub", &file], 0);
    assert_eq!(well.matches("4096 blocks read, 0 repaired in its store, 0 damaged in memory").count(), 3, "{well}");
    // A writer is at work.
    damage(scene.servers[1].pid(), 7);
    says(&scene.end(&["scrub", &file], 0), &["1 damaged in memory"]);
    assert_eq!(states(&scene, &file), ["whole"; 3]);
    says(&scene.end(&["repair", &file], 12), &["another writer is at work", "--take-over"]);
    nbd.kill().unwrap();
    says(&nbd.output(), &["a copy catches up", "a copy is whole"]);

    // No writer is.
    damage(scene.servers[2].pid(), 7);
    let found = scene.end(&["scrub", &file], 15);
    says(&found, &["1 damaged in memory", &scene.addresses[2], "remora volume repair"]);
    assert_eq!(states(&scene, &file), ["whole", "whole", "behind"]);
    says(&scene.end(&["repair", &file, "--take-over"], 0), &["all 3 copies are whole"]);
    assert_eq!(states(&scene, &file), ["whole"; 3]);
    scene.end(&["scrub", &file], 0);
}

#[test]
fn repair_levels_servers_that_came_back_and_names_one_that_does_not_answer() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    nbd.kill().unwrap();
    let address = scene.addresses[0].clone();
    scene.servers[0].kill().unwrap();
    let stuck = scene.end(&["repair", &file, "--take-over", "--copy-timeout", "1s", "--wait", "2s"], 10);
    says(&stuck, &[&format!("the copy at {address} cannot be taken back"), "--wait"]);
    (scene.servers[0], _) = scene.serve(&address);
    assert_eq!(states(&scene, &file), ["empty", "whole", "whole"]);
    says(&scene.end(&["repair", &file, "--take-over"], 0), &["all 3 copies are whole"]);
    let copies = status(&scene, &file)["copies"].clone();
    for copy in copies.as_array().unwrap() {
        assert_eq!(copy["state"], "whole", "{copy}");
        assert_eq!(copy["has_store"], false, "{copy}");
        assert_eq!(copy["is_cut"], false, "{copy}");
        assert_eq!(copy["memory"], 64 << 20, "{copy}");
        assert!(copy["memory_used"].as_u64().unwrap() > 16 << 20 && copy["catch_up_blocks"].is_null(), "{copy}");
        assert_eq!(copy["durable"], copy["applied"], "{copy}");
    }
}

#[test]
fn a_volume_grows_with_its_file_but_not_under_a_writer_that_is_at_work() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 16M", "flush"]).unwrap();
    qemu_io(&socket, &["write -P 7 16M 4k"]).unwrap_err();
    says(&scene.end(&["grow", &file, "--size", "20MiB"], 12), &["another writer is at work", "--take-over"]);
    says(&scene.end(&["grow", &file, "--size", "8MiB"], 2), &["does not become smaller"]);
    says(&scene.end(&["grow", &file, "--size", "20000001"], 2), &["--size", "multiple of 4096"]);
    qemu_io(&socket, &["read -P 7 0 16M"]).unwrap();

    // One server does not answer: the others and the file get the new size, and its name is said.
    let (address, before) = (scene.addresses[2].clone(), fs::read_to_string(&file).unwrap());
    scene.servers[2].kill().unwrap();
    let left = scene.end(&["grow", &file, "--size", "20MiB", "--take-over"], 10);
    says(&left, &["has 20971520 bytes now", "has not grown everywhere", &address, "run the command again"]);
    ends(&mut nbd, 11);
    (scene.servers[2], _) = scene.serve(&address);
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["read -P 7 0 16M", "read -P 0 16M 4M", "write -P 8 16M 4M", "flush"]).unwrap();
    // It had its copy in memory only, and the writer gives it one of the new size.
    says(&scene.end(&["grow", &file, "--size", "20MiB"], 0), &["the copy has the new size"]);
    qemu_io(&socket, &["read -P 7 0 16M", "read -P 8 16M 4M"]).unwrap();
    nbd.kill().unwrap();

    // The file of before describes a volume that is no more.
    let earlier = scene.socket("earlier.volume");
    fs::write(&earlier, before).unwrap();
    says(&scene.end(&["status", &earlier], 10), &["another size", "take its file from the host where it was"]);
}

#[test]
fn a_volume_is_removed_with_its_file_but_not_from_a_writer_that_is_at_work() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    says(&scene.end(&["remove", &file], 12), &["another writer is at work", "--take-over"]);
    qemu_io(&socket, &["read -P 7 0 1M", "write -P 8 0 4k", "flush"]).unwrap();
    says(&scene.end(&["status", &file], 0), &["whole ", "writer heard", "server's memory"]);
    // A server that does not answer may still have its copy.
    let address = scene.addresses[2].clone();
    scene.servers[2].kill().unwrap();
    let left = scene.end(&["remove", &file, "--take-over"], 10);
    says(
        &left,
        &[&format!("{}: the copy is removed", scene.addresses[0]), &format!("{address} may still have"), "kept"],
    );
    let ended = nbd.wait(crate::kit::LONG).unwrap();
    assert!([Some(10), Some(11)].contains(&ended.code()), "{ended}:\n{}", nbd.output());
    (scene.servers[2], _) = scene.serve(&address);
    says(&scene.end(&["remove", &file], 0), &["there was no copy", "the volume and its file are removed"]);
    assert!(!Path::new(&file).exists());
    // Their memory is free again: it has no room for two of these.
    let servers = scene.addresses.join(",");
    for name in ["one.volume", "two.volume"] {
        let file = scene.stage.path(name);
        scene.end(&["create", &file, "--size", "40MiB", "--servers", &servers], 0);
        scene.end(&["remove", &file], 0);
    }
}

#[test]
fn a_volume_that_was_not_made_leaves_nothing_behind() {
    let mut scene = Scene::new(None, &[]);
    let address = scene.addresses[2].clone();
    scene.servers[2].kill().unwrap();
    (scene.servers[2], _) = scene.serve_with(&["serve", "--listen", &address, "--memory", "8MiB"]);
    let (file, servers) = (scene.stage.path("data.volume"), scene.addresses.join(","));
    for _ in 0..2 {
        // The second one has memory at the first two servers, because the first one was removed there.
        let failed = scene.end(&["create", &file, "--size", "40MiB", "--servers", &servers], 10);
        says(&failed, &["the volume was not made", &address, "no memory left"]);
        assert!(!failed.contains("may keep a copy"), "{failed}");
        assert!(fs::metadata(&file).is_err());
    }
}
