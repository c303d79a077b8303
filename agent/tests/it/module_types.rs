//! Data types of other modules: a server that loads a value of a module that it lacks ends its process, so it is refused
//! before anything is touched.

use remora_lab::{Server, require};

use crate::kit::{LONG, Stage, assert_untouched, built_module, ends, quick, says};

#[test]
fn a_server_that_lacks_a_module_whose_data_the_snapshot_holds_is_refused_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let library = built_module(&stage, "typed");
        let with_the_module = || quick(kind).config("loadmodule", &library);
        let primary = with_the_module().start().unwrap();
        primary.client().unwrap().ok(&["TYPED.SET", "key"]).unwrap();
        let source = stage.source(&primary.url(), &[]);

        let without = Server::start(kind).unwrap();
        without.client().unwrap().ok(&["SET", "own", "1"]).unwrap();
        let said = ends(&mut stage.replica(&without.url(), source.address, &["--replace"]), 3);
        says(&said, &[&without.url(), "lacks modules that the primary has loaded: typed"]);
        assert_untouched(&without);
        assert_eq!(without.client().unwrap().text(&["GET", "own"]).unwrap(), "1");

        // The same snapshot, at a server that has it.
        let with = with_the_module().start().unwrap();
        stage.replica(&with.url(), source.address, &[]).wait_for_success(LONG).unwrap();
        assert_eq!(with.client().unwrap().text(&["TYPE", "key"]).unwrap(), "typed-one");
    }
}
