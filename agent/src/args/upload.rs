//! How fast an agent sends slots to others: `auto`, `none`, or a rate.

use std::{fmt, str::FromStr};

use crate::units::Size;

/// The value of `--upload-limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UploadLimit {
    /// As fast as leaves the queue of the network link short for others.
    #[default]
    Auto,
    /// As fast as TCP does.
    Unlimited,
    /// Bytes per second.
    Rate(Size),
}

impl UploadLimit {
    /// The rate; `None` if none is given.
    pub fn rate(self) -> Option<Size> {
        match self {
            UploadLimit::Rate(rate) => Some(rate),
            UploadLimit::Auto | UploadLimit::Unlimited => None,
        }
    }
}

impl FromStr for UploadLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<UploadLimit, String> {
        match text {
            "auto" => Ok(UploadLimit::Auto),
            "none" => Ok(UploadLimit::Unlimited),
            rate => parse_rate(rate).map(UploadLimit::Rate).map_err(|error| format!("{error}; or auto, or none")),
        }
    }
}

impl fmt::Display for UploadLimit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UploadLimit::Auto => to.write_str("auto"),
            UploadLimit::Unlimited => to.write_str("none"),
            UploadLimit::Rate(rate) => write!(to, "{}", rate.get()),
        }
    }
}

/// The lowest rate: below it a slot of the default size takes longer than its reader waits for a byte of it.
const LEAST_RATE: Size = Size::bytes(64 << 10);

pub(super) fn parse_rate(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: crate::units::UnitError| error.to_string())?;
    if size < LEAST_RATE { Err(format!("the rate must be at least {LEAST_RATE} per second")) } else { Ok(size) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_that_would_stall_every_reader_is_refused() {
        assert!(parse_rate("1MiB").is_ok());
        assert!(parse_rate("0").is_err() && parse_rate("1KiB").is_err());
    }

    #[test]
    fn it_is_a_word_or_a_rate() {
        assert_eq!("auto".parse(), Ok(UploadLimit::Auto));
        assert_eq!("none".parse(), Ok(UploadLimit::Unlimited));
        assert_eq!("105MiB".parse(), Ok(UploadLimit::Rate(Size::mebibytes(105))));
        for wrong in ["", "0", "1KiB", "Auto", "fast"] {
            assert!(wrong.parse::<UploadLimit>().is_err_and(|error| error.ends_with("or auto, or none")), "{wrong}");
        }
        for same in ["auto", "none", "110100480"] {
            assert_eq!(same.parse::<UploadLimit>().map(|limit| limit.to_string()), Ok(same.to_owned()));
        }
    }
}
