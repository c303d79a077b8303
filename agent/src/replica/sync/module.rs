//! The server's module: whether it is there and may be used, and how it is shown memory.

use std::time::Instant;

use super::{Flow, GO_ON, Sync};
use crate::args::ModuleLoad;
use crate::exit::Failure;
use crate::replica::delivery::Order;
use crate::replica::introduction::Introduction;
use crate::replica::{SETTLE_LIMIT, SETTLE_POLL};
use crate::server::module::{field, speaks_our_protocol};
use crate::server::{RefusalKind, ServerError};

impl Sync {
    /// Looks whether the server has our module, and makes it load from its link if so. Why not is said; the link does without.
    pub(super) async fn look_for_the_module(&mut self) -> Result<bool, Failure> {
        if self.args.module_load == ModuleLoad::Off {
            return Ok(false);
        }
        match self.module_is_usable().await? {
            Ok(()) => return Ok(true),
            Err(None) => {}
            Err(Some(why)) => tracing::info!("the server has the module, but it is not used: {why}"),
        }
        Ok(false)
    }

    /// Points the server at our link and makes its replication position worthless, which must be so before the module empties it. Where
    /// the server does not permit that, its module is not used, and `false` comes back: the server was not changed.
    pub(super) async fn give_up_the_position(&mut self) -> Result<bool, Failure> {
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        let began = Instant::now();
        // First of all: the server may ask for its payload before the answer to the last command is here.
        self.delivery.order(Order::UseModule(true));
        loop {
            match self.control.follow_from_nothing((&host, port)).await {
                Ok(replid) => {
                    self.worthless = Some(replid);
                    tracing::info!("the server has the module: long strings are loaded out of shared memory");
                    return Ok(true);
                }
                // It still loads from the link of an agent before us, which is gone.
                Err(error) if error.refusal() == Some(RefusalKind::Loading) && began.elapsed() < SETTLE_LIMIT => {}
                Err(ServerError::Refused { text, .. }) => {
                    self.delivery.order(Order::UseModule(false));
                    tracing::info!(
                        "the server has the module, but it is not used: REPLICAOF in a transaction was refused: {text}; its user \
                         needs +multi +exec +discard"
                    );
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(SETTLE_POLL).await;
        }
    }

    /// `Err(None)`: there is no module. `Err(Some)`: why it can't be used.
    async fn module_is_usable(&mut self) -> Result<Result<(), Option<String>>, Failure> {
        let status = match self.control.command(&["REMORA.STATUS"]).await {
            Ok(status) => status,
            Err(error) if error.refusal() == Some(RefusalKind::Unknown) => return Ok(Err(None)),
            Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
                let text = "our user may not ask it: +remora.status +remora.load";
                return Ok(Err(Some(text.into())));
            }
            Err(ServerError::Refused { text, .. }) => return Ok(Err(Some(text))),
            Err(error) => return Err(error.into()),
        };
        let why = |text: &str| Ok(Err(Some(text.to_string())));
        if !speaks_our_protocol(&status) {
            return why("it is of another version; upgrade the older of the two");
        }
        if field(&status, b"load").as_deref() != Some("yes") {
            return why("it was loaded for capture only");
        }
        if self.args.state_dir.is_some() {
            return why("with --state-dir the snapshot comes from files");
        }
        self.load_from_the_link().await.map(|loads| loads.map_err(Some))
    }

    /// Has the server load from its link into its own data, also where it is not empty: the module empties it then.
    async fn load_from_the_link(&mut self) -> Result<Result<(), String>, Failure> {
        let Some(before) = self.target.diskless_load.clone() else {
            return Ok(Err("we may not read repl-diskless-load".into()));
        };
        if before == "swapdb" {
            return Ok(Err(
                "with repl-diskless-load swapdb the server goes on serving its old data, and loads beside them".into(),
            ));
        }
        for wanted in ["flush-before-load", "on-empty-db"] {
            if self.record.change(self.control.client().await?, "repl-diskless-load", &before, wanted).await? {
                return Ok(Ok(()));
            }
        }
        Ok(Err("the server has no way to load from its link".into()))
    }

    /// Shows the server memory, as the delivery wishes. The module empties the server then: so it must follow our link, and show a
    /// position that no primary continues.
    pub(super) async fn introduce(&mut self, introduction: Introduction) -> Flow {
        let number = introduction.number;
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        let facts = self.still_follows(&[(&host, port)]).await?;
        if self.worthless.is_none() || facts.replid != self.worthless {
            // It has been in step since, with us or with its primary. Its link ends by this; it comes again, and is introduced then.
            if !self.give_up_the_position().await? {
                let answer = Err("its replication position can't be made worthless".to_string());
                self.delivery.order(Order::Introduced { number, answer });
            }
            return GO_ON;
        }
        self.emptied = true;
        let answer = introduction.perform(self.control.client().await?).await;
        if answer.is_err() && self.control.facts().await.is_ok_and(|facts| facts.keys() > 0) {
            self.emptied = false; // it refused before it removed anything
        }
        self.delivery.order(Order::Introduced { number, answer });
        GO_ON
    }
}
