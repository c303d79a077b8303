//! The server's module: whether it can be used, and how it receives memory.

use tokio::time::Instant;

use super::Keeper;
use crate::delivery::introduction::{Answer, Introduction};
use crate::machine::{Followed, Introduced, Lapse, NotFollowed};
use crate::preflight::FOLLOW;
use remora_process::exit::Failure;
use remora_server::module::{field, speaks_our_protocol};
use remora_server::{RefusalKind, ServerError};
use remora_server::{SETTLE_LIMIT, SETTLE_POLL};

/// Whether the module can be used.
enum Usable {
    Yes,
    /// There is no module.
    Absent,
    No(String),
}

/// Which primary a server follows while it is about to be changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// The one that the preflight found, or none.
    AsFound,
    /// The agent's link.
    AtTheLink,
}

impl Keeper {
    /// Checks whether the server has our module, and if so makes the server load from its link.
    pub(super) async fn look_for_the_module(&mut self) -> Result<bool, Failure> {
        if !self.options.module_load {
            self.watched.meter.set_no_fast_keys("--module-load is off");
            return Ok(false);
        }
        match self.module_is_usable().await? {
            Usable::Yes => return Ok(true),
            Usable::Absent => self.watched.meter.set_no_fast_keys("the server does not have the module"),
            Usable::No(why) => {
                tracing::info!("the server has the module, but it is not used: {why}");
                self.watched.meter.set_no_fast_keys(&why);
            }
        }
        Ok(false)
    }

    async fn module_is_usable(&mut self) -> Result<Usable, Failure> {
        let no = |why: &str| Ok(Usable::No(why.to_string()));
        let status = match self.control.command(&["REMORA.STATUS"]).await {
            Ok(status) => status,
            Err(error) if error.refusal() == Some(RefusalKind::Unknown) => return Ok(Usable::Absent),
            Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
                return no("our user may not ask it: +remora.status +remora.load");
            }
            Err(ServerError::Refused { text, .. }) => return Ok(Usable::No(text)),
            Err(error) => return Err(error.into()),
        };
        if !speaks_our_protocol(&status) {
            return no("it is of another version; upgrade the older of the two");
        }
        if field(&status, b"load").as_deref() != Some("yes") {
            return no("it was loaded for capture only");
        }
        // A module's own SetAbsExpire makes a writable replica take the key for one that its clients wrote
        // (rememberSlaveKeyWithExpire in db.c). It would remove the key by itself when the time is over, also where the
        // stream takes the expiry away again.
        let setting = "replica-read-only";
        match self.control.client().await?.config_get(setting).await?.as_deref() {
            Some("yes") => {}
            Some(_) => {
                return no(
                    "the server accepts writes of clients (replica-read-only no), and would remove expired keys by itself",
                );
            }
            None => return no("we may not read replica-read-only"),
        }
        if self.target.conversion.is_some() {
            return no("the snapshot is converted for it");
        }
        if self.options.state_dir.is_some() {
            return no("with --state-dir the snapshot comes from files");
        }
        self.load_from_the_link().await
    }

    /// Has the server load from its link into its own data, also where it is not empty: the module empties it then.
    async fn load_from_the_link(&mut self) -> Result<Usable, Failure> {
        let Some(before) = self.target.diskless_load.clone() else {
            return Ok(Usable::No("we may not read repl-diskless-load".into()));
        };
        if before == "swapdb" {
            let why = "with repl-diskless-load swapdb the server goes on serving its old data, and loads beside them";
            return Ok(Usable::No(why.into()));
        }
        for wanted in ["flush-before-load", "on-empty-db"] {
            if self
                .record
                .change(self.control.client().await?, "repl-diskless-load", before.as_bytes(), wanted.as_bytes())
                .await?
            {
                return Ok(Usable::Yes);
            }
        }
        Ok(Usable::No("the server has no way to load from its link".into()))
    }

    /// Points the server at our link and makes its replication position worthless, which must be so before the module
    /// empties it. A server that does not permit that was not changed. The caller has just asked the server that it
    /// stands as `standing` says; it is asked again before each further try.
    pub(super) async fn give_up_the_position(&mut self, standing: Standing) -> Result<(), NotFollowed> {
        let (host, port) = self.link();
        if remora_base::mutation::Mutation::PositionKept.is_active() {
            let client = self.control.client().await;
            let client = client.map_err(|error| NotFollowed::Failed { lapse: error.into(), told: false })?;
            let followed = client.command(&[FOLLOW, &host, &port.to_string()]).await;
            return followed.map(drop).map_err(|error| NotFollowed::Failed { lapse: error.into(), told: true });
        }
        let began = Instant::now();
        loop {
            match self.control.follow_from_nothing((&host, port)).await {
                Ok(replid) => {
                    self.worthless = Some(replid);
                    tracing::info!("the server has the module: long strings are loaded out of shared memory");
                    return Ok(());
                }
                // The server still loads from the link of an earlier agent, which is gone.
                Err(error) if error.refusal() == Some(RefusalKind::Loading) && began.elapsed() < SETTLE_LIMIT => {}
                Err(ServerError::Refused { text, .. }) => return Err(NotFollowed::NoTransaction(text)),
                Err(error) => return Err(NotFollowed::Failed { lapse: error.into(), told: true }),
            }
            tokio::time::sleep(SETTLE_POLL).await;
            let asked = match standing {
                Standing::AsFound => self.still_as_found().await.map_err(Lapse::from),
                Standing::AtTheLink => self.verify(Followed::Link).await.map(drop),
            };
            asked.map_err(|lapse| NotFollowed::Failed { lapse, told: standing == Standing::AtTheLink })?;
        }
    }

    /// Gives the module memory, as the delivery wishes. The module empties the server then: so the server must follow
    /// our link, and have a position that no primary continues.
    pub(super) async fn introduce(
        &mut self,
        introduction: Introduction,
    ) -> (Introduced, Option<Result<Answer, String>>) {
        let facts = match self.verify(Followed::Link).await {
            Ok(facts) => facts,
            Err(lapse) => return (Introduced::Failed(lapse), None),
        };
        let is_worthless = self.worthless.is_some() && facts.replid == self.worthless;
        let is_worthless = is_worthless || remora_base::mutation::Mutation::PositionKept.is_active();
        if !is_worthless {
            // The server has been in step since, with us or with its primary.
            return match self.give_up_the_position(Standing::AtTheLink).await {
                Ok(()) => (Introduced::AgainFromNothing, None),
                Err(NotFollowed::NoTransaction(text)) => {
                    let why = format!("its replication position can't be made worthless: {text}");
                    (Introduced::NotUsed, Some(Err(why)))
                }
                Err(NotFollowed::Failed { lapse, .. }) => (Introduced::Failed(lapse), None),
            };
        }
        let client = match self.control.client().await {
            Ok(client) => client,
            Err(error) => return (Introduced::Failed(Lapse::from(error)), None),
        };
        // Also where the answer does not come, or the introduction is cancelled.
        let was_emptied = std::mem::replace(&mut self.before.emptied, true);
        let answer = introduction.perform(client).await;
        let answer = answer.map(|answer| match self.options.fast_keys {
            true => answer,
            false => Answer { fast_keys: Err("--fast-keys is off".into()), verify: false, ..answer },
        });
        let why = match &answer {
            Ok(answer) => answer.fast_keys.as_ref().err(),
            Err(text) => Some(text),
        };
        self.watched.meter.set_no_fast_keys(why.map_or("", String::as_str));
        // A module that refused before it removed anything has left the keys.
        let kept = answer.is_err() && self.control.facts().await.is_ok_and(|facts| facts.keys() > 0);
        self.before.emptied = was_emptied || !kept;
        (Introduced::Done { emptied: !kept }, Some(answer))
    }
}
