//! The ends of a sync: in which state the server is left, and the text that describes it.

use tokio::time::Instant;

use super::Keeper;
use crate::args::OnFailure;
use crate::replica::control::{Expected, NotOurs};
use crate::replica::machine::{Followed, Lapse, Leaving};
use crate::replica::{SETTLE_LIMIT, SETTLE_POLL};
use crate::server::ServerError;

impl Keeper {
    /// Restores all settings of a server that is a replica of the primary.
    pub(super) async fn finish(&mut self) -> Result<(), ServerError> {
        self.try_to_put_settings_back().await?;
        self.record.close();
        Ok(())
    }

    /// Leaves the server in a safe state after a failure. Returns a text that follows the failure's.
    pub(super) async fn leave(&mut self, how: Leaving) -> String {
        match how {
            Leaving::Untouched => {
                let settings = self.put_settings_back_but_a_dead_links_login().await;
                format!("the server was not touched{settings}")
            }
            Leaving::AsItIs => format!("the server is left as it is{}", self.put_settings_back().await),
            Leaving::ToPrimary => self.leave_to_the_primary().await,
            Leaving::Detached { as_before } => self.detach(as_before).await,
        }
    }

    /// Points a server with a complete data set at the primary. Its own replication fetches the rest.
    async fn leave_to_the_primary(&mut self) -> String {
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        let told = self.point_at_the_primary_from_either().await;
        let settings = self.put_settings_back().await;
        match told {
            Ok(()) => {
                format!("the server holds a whole data set and was told to follow {host}:{port} by itself{settings}")
            }
            Err(NotOurs::TakenOver(how)) => format!("the server {how} and is left as it is{settings}"),
            Err(NotOurs::Unknown(error)) => format!(
                "the server holds a whole data set and follows our closed link {}: {error}{settings}",
                self.link
            ),
        }
    }

    async fn point_at_the_primary_from_either(&mut self) -> Result<(), NotOurs> {
        let (host, port) = (self.primary.host.clone(), self.primary.port);
        let link = self.link();
        let either = [(link.0.as_str(), link.1), (host.as_str(), port)];
        self.control.still_ours(Expected::OneOf(&either)).await?;
        self.record.put_the_login_back(self.control.client().await?).await?;
        self.control.follow((&host, port), Expected::OneOf(&either)).await
    }

    /// The data set is incomplete: the server must not be taken for a replica, nor for a primary with all the keys.
    async fn detach(&mut self, as_before: bool) -> String {
        match self.try_detach(as_before).await {
            Ok(left) => left,
            Err(NotOurs::TakenOver(how)) => {
                let settings = self.put_settings_back().await;
                format!("the server {how}; it is left as it is, with what it had loaded until then{settings}")
            }
            Err(NotOurs::Unknown(error)) => format!(
                "the server could not be detached from our closed link {} ({error}): it is read-only and not whole; \
                 REPLICAOF NO ONE detaches it, and the next remora replica for it takes it as it is",
                self.link
            ),
        }
    }

    async fn try_detach(&mut self, as_before: bool) -> Result<String, NotOurs> {
        // A server that is loading refuses commands until it has noticed that its link is gone.
        let began = Instant::now();
        let link = self.link();
        let before = loop {
            let facts = self.control.still_ours(Expected::OneOf(&[(&link.0, link.1)])).await?;
            match self.control.command(&["REPLICAOF", "NO", "ONE"]).await {
                Ok(_) => break facts,
                Err(error) if began.elapsed() > SETTLE_LIMIT => return Err(error.into()),
                Err(error @ ServerError::Unreachable { .. }) => return Err(error.into()),
                Err(_) => {}
            }
            tokio::time::sleep(SETTLE_POLL).await;
        };
        while self.control.facts().await?.loading == Some(true) && began.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(SETTLE_POLL).await;
        }
        let settings = self.put_settings_back().await;
        let keys = self.control.still_ours(Expected::NoPrimary(&before)).await?.keys();
        let left = match self.args.on_failure {
            _ if as_before => "the server was detached and holds what it held before".to_string(),
            OnFailure::Empty => {
                self.control.command(&["FLUSHALL"]).await?;
                "the server was detached and emptied".to_string()
            }
            OnFailure::Detached if keys == 0 => "the server was detached and is empty".to_string(),
            OnFailure::Detached => {
                format!("the server was detached and holds {keys} keys, perhaps not whole, open to writes")
            }
        };
        Ok(format!("{left}{settings}"))
    }

    /// A server that follows the link needs the link's login.
    pub(super) async fn put_settings_back_but_the_login(&mut self) -> Result<(), Lapse> {
        self.verify(Followed::Link).await?;
        self.record.put_back_but_the_login(self.control.client().await?).await?;
        Ok(())
    }

    async fn try_to_put_settings_back(&mut self) -> Result<(), ServerError> {
        self.record.put_back(self.control.client().await?).await
    }

    async fn put_settings_back(&mut self) -> String {
        said_of(self.try_to_put_settings_back().await)
    }

    /// A server that still follows the dead link of an agent before us keeps the login for it: with another one it
    /// would give its real password to what listens there.
    async fn put_settings_back_but_a_dead_links_login(&mut self) -> String {
        if !self.target.unfinished {
            return self.put_settings_back().await;
        }
        match self.control.client().await {
            Ok(client) => said_of(self.record.put_back_but_the_login(client).await),
            Err(error) => said_of(Err(error)),
        }
    }
}

fn said_of(put_back: Result<(), ServerError>) -> String {
    match put_back {
        Ok(()) => String::new(),
        Err(error) => format!("; a setting could not be put back ({error}), the next remora replica for it will"),
    }
}
