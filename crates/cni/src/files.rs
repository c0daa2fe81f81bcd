//! Files of a node that container runtimes and their plugins read: replaced as a whole, so that a reader has the old or the new one.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Replaces a file atomically, even across a loss of power. Runtimes ignore names that begin with a dot, as the unfinished one has.
///
/// # Errors
/// It cannot be written; the former one is left then.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}", std::process::id()));
    // Left by a process that was killed and had this number.
    remove(&beside)?;
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(content)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    if written.is_err() {
        // An incomplete file is of no use.
        drop(fs::remove_file(&beside));
    }
    written
}

/// Writes a file that is missing or differs. Returns whether it did.
///
/// # Errors
/// It cannot be written.
pub fn ensure(path: &Path, content: &[u8], mode: u32) -> io::Result<bool> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(false);
    }
    replace(path, content, mode).map(|()| true)
}

/// Removes a file. Returns whether it existed.
///
/// # Errors
/// It cannot be removed.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_once_with_its_mode_and_nothing_beside() {
        let folder = std::env::temp_dir().join(format!("egress-cni-files-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("secret");
        let outcomes =
            [b"one".as_slice(), b"one", b"two"].map(|content| ensure(&path, content, 0o600).expect("written"));
        assert_eq!(outcomes, [true, false, true]);
        assert_eq!(fs::read(&path).expect("a file"), b"two");
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
        assert!(ensure(&folder.join("none/file"), b"", 0o600).is_err());
        assert_eq!([remove(&path).expect("removed"), remove(&path).expect("gone")], [true, false]);
        fs::remove_dir(&folder).expect("it is empty");
    }
}
