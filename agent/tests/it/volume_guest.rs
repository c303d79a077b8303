//! `remora volume`: a machine whose only disk is a volume.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, require};

use crate::kit::{LONG, says};
use crate::volume::Scene;

/// A machine that is emulated boots in ten seconds on an idle host.
const BOOT: Duration = Duration::from_secs(180);

/// The last round that the guest has said to be on its disk.
fn kept(guest: &Agent) -> u32 {
    let said = guest.stdout();
    let rounds =
        said.lines().filter_map(|line| line.split("guest: round ").nth(1)?.strip_suffix(" is kept")?.parse().ok());
    rounds.max().unwrap_or(0)
}

/// Waits for three more rounds, and returns the last one.
#[track_caller]
fn goes_on(guest: &Agent) -> u32 {
    let before = kept(guest);
    wait_until("three more rounds of the guest", BOOT, || {
        Ok(if kept(guest) >= before + 3 { Ok(()) } else { Err(guest.output()) })
    })
    .unwrap();
    kept(guest)
}

/// The first line of a guest after its boot.
#[track_caller]
fn boots(guest: &mut Agent) -> String {
    guest.wait_for_line("guest: booted", BOOT).unwrap().trim().to_owned()
}

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn a_machine_boots_from_a_volume_lives_through_deaths_of_servers_and_boots_elsewhere() {
    let Some(()) = require::nbd_clients() else { return };
    let Some(machine) = require::rdma_vm() else { return };
    let mut scene = Scene::new(None, &[]);
    let (file, servers) = (scene.stage.path("system.volume"), scene.addresses.join(","));
    says(&scene.end(&["create", &file, "--size", "32MiB", "--servers", &servers], 0), &["3 copies"]);
    let (disk, socket) = (scene.stage.path("disk"), scene.socket("here"));
    let url = |socket: &str| format!("nbd+unix:///?socket={socket}");
    machine.make_disk(Path::new(&disk)).unwrap();
    let mut nbd = scene.nbd(&file, &socket);
    let copied = Command::new("nbdcopy").args(["--flush", &disk, &url(&socket)]).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));

    let mut guest = Agent::run(machine.boot(&url(&socket))).unwrap();
    assert_eq!(boots(&mut guest), "guest: booted, 0 rounds are there, the last is 0, broken: none");
    goes_on(&guest);
    scene.servers[0].kill().unwrap();
    goes_on(&guest);
    let address = scene.addresses[0].clone();
    (scene.servers[0], _) = scene.serve(&address);
    wait_until("three whole copies", LONG, || {
        let status = scene.end(&["status", &file, "--json"], 0);
        Ok(if status.matches("\"state\":\"whole\"").count() == 3 { Ok(()) } else { Err(status) })
    })
    .unwrap();
    scene.servers[1].kill().unwrap();
    let last = goes_on(&guest);

    // The host loses its power, with the machine and the door to the volume.
    guest.kill().unwrap();
    nbd.kill().unwrap();
    let last = last.max(kept(&guest));
    let elsewhere = scene.socket("elsewhere");
    let _nbd = scene.nbd_with(&file, &elsewhere, &["--take-over"]);
    let mut guest = Agent::run(machine.boot(&url(&elsewhere))).unwrap();
    let line = boots(&mut guest);
    let found = line.split("the last is ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<u32>().ok());
    assert!(found.is_some_and(|found| found >= last), "round {last} was synced: {line}");
    let broken = line.split("broken:").nth(1).unwrap().split_whitespace().filter_map(|word| word.parse::<u32>().ok());
    let synced: Vec<u32> = broken.filter(|round| *round <= last).collect();
    assert!(synced.is_empty(), "rounds {synced:?} were synced: {line}");
    goes_on(&guest);
}
