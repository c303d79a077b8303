//! Builds share what they compile: a crate has one set of features, whatever is built.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The sets of features of each crate. A crate that procedural macros or build scripts use as well may have two.
type Features = BTreeMap<String, BTreeSet<String>>;

/// What `cargo tree` says of a build of these packages, with what it needs of each kind.
fn features(packages: &[&str], kinds: &str) -> Features {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--offline", "--prefix", "none", "--format", "{p}|{f}|", "--edges", kinds]);
    let output = cargo.args(packages).current_dir(remora_lab::server::project_root()).output().unwrap();
    assert!(output.status.success(), "{cargo:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut found = Features::new();
    // "tokio v1.54.1|default,fs| (*)"; of a crate of ours the folder follows its version.
    for line in String::from_utf8(output.stdout).unwrap().lines().filter(|line| !line.is_empty()) {
        let [package, features, _] = line.split('|').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let name = package.split(' ').take(2).collect::<Vec<_>>().join(" ");
        found.entry(name).or_default().insert(features.to_owned());
    }
    found
}

#[test]
fn every_build_compiles_a_crate_with_the_features_that_the_tests_have() {
    let tests = features(&["--workspace"], "normal,build,dev");
    assert!(tests.len() > 300, "{tests:?}");
    let product = ["-p", "remora-agent", "-p", "remora-module"];
    // The benches are built together with what they measure.
    let benches = [&["-p", "remora-bench"], &product[..]].concat();
    let builds: [&[&str]; 5] = [&["--workspace"], &product[..2], &product, &["-p", "xtask"], &benches];
    for build in builds {
        let of_build = features(build, "normal,build");
        assert!(of_build.len() > 200, "{build:?}: {of_build:?}");
        for (name, sets) in of_build {
            let of_tests = &tests[&name];
            assert!(
                sets.is_subset(of_tests),
                "{build:?}: {name} has the features {sets:?}, and {of_tests:?} in the tests: name the missing ones in \
                 dev/features/Cargo.toml"
            );
        }
    }
}
