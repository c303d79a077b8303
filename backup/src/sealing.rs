//! Sealing: objects in the age format, which only the owner of an identity opens.
//!
//! The encryption is the age crate's (feature `age`). What is here: whose keys, and the objects as streams.

use std::io::{self, Read, Write};
use std::path::Path;

use remora_process::exit::Failure;

/// How the key of a sealed object ends.
pub(crate) const ENDING: &str = ".age";

/// What a manifest says of such an object.
pub(crate) const FORMAT: &str = "age";

/// How a recipient begins.
const RECIPIENT: &str = "age1";

/// Bytes of a file with recipients or identities at most: some hundred.
const FILE_BYTES: usize = 64 << 10;

/// Reads recipients: each argument is one, or a file with one on each line.
///
/// # Errors
/// One is not a recipient, or a file cannot be read.
pub(crate) fn recipients(arguments: &[String]) -> Result<Option<Recipients>, Failure> {
    let mut all = Vec::new();
    for argument in arguments {
        if argument.starts_with(RECIPIENT) {
            all.push((argument.clone(), "--encrypt-to".to_owned()));
            continue;
        }
        let unusable = |what: &dyn std::fmt::Display| {
            Failure::refused(format!(
                "--encrypt-to {argument} is neither a recipient (age1…) nor a file of recipients: {what}"
            ))
        };
        let mut text = String::new();
        let file = std::fs::File::open(argument).map(|file| file.take(FILE_BYTES as u64));
        file.and_then(|mut file| file.read_to_string(&mut text)).map_err(|error| unusable(&error))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = all.len();
        all.extend(lines.map(|line| (line.to_owned(), argument.clone())));
        if all.len() == before {
            return Err(unusable(&"it has none"));
        }
    }
    if all.is_empty() { Ok(None) } else { Recipients::parse(&all).map(Some) }
}

/// A writer through which an object passes, sealed or as it is.
pub(crate) enum Sealing<W: Write> {
    Plain(W),
    #[cfg(feature = "age")]
    Age(Box<age::stream::StreamWriter<W>>),
}

impl<W: Write> Sealing<W> {
    /// Begins an object. Without recipients it stays as it is.
    pub(crate) fn begin(recipients: Option<&Recipients>, to: W) -> io::Result<Sealing<W>> {
        match recipients {
            None => Ok(Sealing::Plain(to)),
            Some(recipients) => recipients.seal(to),
        }
    }

    /// Ends the object. What was below it is not ended.
    pub(crate) fn finish(self) -> io::Result<W> {
        match self {
            Sealing::Plain(to) => Ok(to),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.finish(),
        }
    }
}

impl<W: Write> Write for Sealing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sealing::Plain(to) => to.write(bytes),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sealing::Plain(to) => to.flush(),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.flush(),
        }
    }
}

/// The holders of the keys that open sealed objects.
#[cfg(feature = "age")]
pub(crate) struct Recipients(Vec<age::x25519::Recipient>);

#[cfg(feature = "age")]
impl Recipients {
    /// `all`: each recipient, and where it was given.
    fn parse(all: &[(String, String)]) -> Result<Recipients, Failure> {
        let parse = |(text, from): &(String, String)| {
            let parsed = text.parse::<age::x25519::Recipient>();
            parsed.map_err(|error| Failure::refused(format!("{text} ({from}) is not a recipient of age: {error}")))
        };
        all.iter().map(parse).collect::<Result<_, _>>().map(Recipients)
    }

    fn seal<W: Write>(&self, to: W) -> io::Result<Sealing<W>> {
        let all = self.0.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = age::Encryptor::with_recipients(all).map_err(io::Error::other)?;
        Ok(Sealing::Age(Box::new(encryptor.wrap_output(to)?)))
    }
}

/// What opens sealed objects.
#[cfg(feature = "age")]
pub(crate) struct Identities {
    file: std::path::PathBuf,
    all: Vec<age::x25519::Identity>,
}

#[cfg(feature = "age")]
impl Identities {
    /// Reads the identities in a file that its owner alone can read, as `age-keygen` writes it.
    ///
    /// # Errors
    /// It cannot be read, other users can read it, or it has no identity.
    pub(crate) fn read(file: &Path) -> Result<Identities, Failure> {
        let unusable = |what: &dyn std::fmt::Display| {
            Failure::refused(format!("the identities in {} (--identity) cannot be used: {what}", file.display()))
        };
        let bytes = remora_wire::secret_file::read(file, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
        if bytes.len() > FILE_BYTES {
            return Err(unusable(&"the file is too long"));
        }
        let text = String::from_utf8(bytes).map_err(|_| unusable(&"the file is not text"))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let all: Result<Vec<_>, _> = lines.map(str::parse::<age::x25519::Identity>).collect();
        let all = all.map_err(|error| unusable(&error))?;
        if all.is_empty() {
            return Err(unusable(&"it has none (AGE-SECRET-KEY-1…)"));
        }
        Ok(Identities { file: file.to_owned(), all })
    }

    /// Opens an object.
    ///
    /// # Errors
    /// None of the identities fits, or the object is damaged at its beginning.
    pub(crate) fn open<'a>(&self, object: impl io::BufRead + 'a, address: &str) -> Result<Box<dyn Read + 'a>, Failure> {
        let failed = |error: age::DecryptError| match error {
            age::DecryptError::NoMatchingKeys => Failure::refused(format!(
                "{address} is encrypted to other recipients: no identity in {} opens it",
                self.file.display()
            )),
            age::DecryptError::Io(error) => match error.downcast::<Failure>() {
                Ok(failure) => failure,
                Err(error) => Failure::refused(format!("{address} is damaged: {error}")),
            },
            error => Failure::refused(format!("{address} is damaged: {error}")),
        };
        let decryptor = age::Decryptor::new_buffered(object).map_err(failed)?;
        let all = self.all.iter().map(|identity| identity as &dyn age::Identity);
        Ok(Box::new(decryptor.decrypt(all).map_err(failed)?))
    }
}

/// Nothing: this program was built without the feature `age`.
#[cfg(not(feature = "age"))]
pub(crate) enum Recipients {}

#[cfg(not(feature = "age"))]
impl Recipients {
    fn parse(_: &[(String, String)]) -> Result<Recipients, Failure> {
        Err(Failure::refused("this remora was built without the feature age, so --encrypt-to cannot be used"))
    }

    fn seal<W: Write>(&self, _: W) -> io::Result<Sealing<W>> {
        match *self {}
    }
}

/// Nothing: this program was built without the feature `age`.
#[cfg(not(feature = "age"))]
pub(crate) enum Identities {}

#[cfg(not(feature = "age"))]
impl Identities {
    /// Refuses.
    pub(crate) fn read(_: &Path) -> Result<Identities, Failure> {
        Err(Failure::refused("this remora was built without the feature age, so --identity cannot be used"))
    }

    /// Is never called.
    pub(crate) fn open<'a>(&self, _: impl io::BufRead + 'a, _: &str) -> Result<Box<dyn Read + 'a>, Failure> {
        match *self {}
    }
}

impl std::fmt::Debug for Recipients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recipients(…)")
    }
}

impl std::fmt::Debug for Identities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identities(…)")
    }
}

#[cfg(all(test, feature = "age"))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use age::secrecy::ExposeSecret;

    use super::*;

    fn sealed(recipients: &Recipients, bytes: &[u8]) -> Vec<u8> {
        let mut sealing = Sealing::begin(Some(recipients), Vec::new()).unwrap();
        sealing.write_all(bytes).unwrap();
        sealing.finish().unwrap()
    }

    #[test]
    fn what_was_sealed_is_opened_by_the_right_identity_only_and_only_if_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let identity = |name: &str| {
            let (key, file) = (age::x25519::Identity::generate(), folder.path().join(name));
            std::fs::write(&file, format!("# a key\n{}\n", key.to_string().expose_secret())).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
            (key.to_public().to_string(), file)
        };
        let (recipient, file) = identity("one");
        let (other, other_file) = identity("other");
        let list = folder.path().join("recipients");
        std::fs::write(&list, format!("# ours\n{recipient}\n")).unwrap();
        let bytes: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
        for arguments in [vec![recipient.clone()], vec![list.display().to_string()], vec![other, recipient]] {
            let object = sealed(&recipients(&arguments).unwrap().unwrap(), &bytes);
            let identities = Identities::read(&file).unwrap();
            let read = |object: &[u8]| {
                let mut read = Vec::new();
                identities
                    .open(object, "it")
                    .map_err(|failure| failure.message)?
                    .read_to_end(&mut read)
                    .map_err(|e| e.to_string())?;
                Ok::<_, String>(read)
            };
            assert_eq!(read(&object).unwrap(), bytes);
            for cut in [1, 100, object.len() / 2, object.len() - 1] {
                assert!(read(&object[..cut]).is_err(), "cut at {cut}");
            }
            for at in [3, 40, 300, object.len() / 2, object.len() - 1] {
                let mut changed = object.clone();
                changed[at] ^= 1;
                assert!(read(&changed).is_err(), "byte {at}");
            }
            if arguments.len() == 1 {
                let error = Identities::read(&other_file).unwrap().open(&*object, "it").map(|_| ()).unwrap_err();
                assert!(error.message.contains("other recipients"), "{error}");
            }
        }
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(Identities::read(&file).unwrap_err().message.contains("chmod 600"));
    }

    #[test]
    fn what_is_no_recipient_is_refused() {
        assert!(recipients(&[]).unwrap().is_none());
        let empty = tempfile::NamedTempFile::new().unwrap();
        for wrong in ["age1wrong", "/nowhere/recipients", empty.path().to_str().unwrap()] {
            assert!(recipients(&[wrong.to_owned()]).unwrap_err().message.contains(wrong), "{wrong}");
        }
    }
}
