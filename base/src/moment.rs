//! Moment: a second, as text and as part of a name.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Seconds since 1970, in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(u64);

/// The last second that has a year of four digits.
const LAST: u64 = 253_402_300_799;

impl Moment {
    /// This many seconds after the beginning of 1970.
    pub const fn seconds(seconds: u64) -> Moment {
        Moment(if seconds > LAST { LAST } else { seconds })
    }

    /// The present second, by this host's clock.
    pub fn now() -> Moment {
        Moment::seconds(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
    }

    /// Seconds since 1970.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// As part of a name that sorts by time: `20261125T234500Z`.
    pub fn compact(self) -> String {
        self.to_string().chars().filter(char::is_ascii_alphanumeric).collect()
    }

    /// Reads what [`Moment::compact`] has written.
    pub fn from_compact(text: &str) -> Option<Moment> {
        let part = |from: usize, to: usize| text.get(from..to);
        let (date, clock) = (part(0, 4)?.to_owned() + "-" + part(4, 6)? + "-" + part(6, 8)?, part(8, 16)?);
        let clock = [clock.get(0..3)?, clock.get(3..5)?, clock.get(5..8)?].join(":");
        let moment: Moment = format!("{date}{clock}").parse().ok()?;
        (moment.compact() == text).then_some(moment)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = i64::try_from(self.0).unwrap_or_default();
        let date = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        f.pad(&date.format(&Rfc3339).unwrap_or_else(|_| self.0.to_string()))
    }
}

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Moment, String> {
        let expected =
            || format!("{text} is not a moment: write 2026-11-25T23:45:00Z (or with +01:00), or seconds since 1970");
        let seconds = match text.parse::<u64>() {
            Ok(seconds) => seconds,
            Err(_) => {
                let date = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| expected())?;
                u64::try_from(date.unix_timestamp()).map_err(|_| expected())?
            }
        };
        if seconds > LAST { Err(expected()) } else { Ok(Moment(seconds)) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn moments_are_read_and_written_in_utc() {
        for (text, seconds) in [
            ("2026-11-25T23:45:00Z", 1_795_650_300),
            ("2026-11-26T00:45:00+01:00", 1_795_650_300),
            ("1795650300", 1_795_650_300),
            ("2024-02-29T12:00:00.9Z", 1_709_208_000),
        ] {
            assert_eq!(text.parse::<Moment>().unwrap().get(), seconds, "{text}");
        }
        let moment = Moment::seconds(1_795_650_300);
        assert_eq!((moment.to_string(), moment.compact()), ("2026-11-25T23:45:00Z".into(), "20261125T234500Z".into()));
        for wrong in ["yesterday", "2026-11-25", "2026-11-25T23:45:00", "-1", "1969-01-01T00:00:00Z", "99999999999999"]
        {
            assert!(wrong.parse::<Moment>().is_err(), "{wrong}");
        }
        assert_eq!(Moment::seconds(u64::MAX).to_string(), "9999-12-31T23:59:59Z");
    }
}
