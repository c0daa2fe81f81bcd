//! Archives that are the same bytes on every machine and at every time.

use std::path::Path;
use std::process::Command;

/// `tar` that writes this archive, compressed if its name ends with `gz`: sorted, with root's ownership, modes that do not depend on
/// the user's mask, and this time in seconds since 1970. The caller adds the files.
pub fn archive(file: &Path, time: u64) -> Command {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX"]);
    tar.arg(format!("--mtime=@{time}"));
    if file.extension().is_some_and(|end| end == "gz" || end == "tgz") {
        tar.arg("--use-compress-program=gzip --best --no-name");
    }
    tar.arg("-cf").arg(file);
    tar
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::output;

    #[test]
    fn the_same_files_make_the_same_archive() {
        let folder = std::env::temp_dir().join(format!("egress-archive-{}", std::process::id()));
        let packed = |name: &str, names: [&str; 2], mode: u32, age: u64| {
            let files = folder.join(name);
            fs::create_dir_all(&files).expect("a folder");
            for name in names {
                let file = File::create(files.join(name)).expect("a file");
                file.set_permissions(Permissions::from_mode(mode)).expect("its mode");
                file.set_modified(SystemTime::now() - Duration::from_secs(age)).expect("its time");
            }
            let file = folder.join(format!("{name}.tar.gz"));
            output(archive(&file, 1_800_000_000).arg("-C").arg(&files).arg(".")).expect("tar");
            fs::read(file).expect("an archive")
        };
        let (one, other) = (packed("one", ["a", "b"], 0o600, 0), packed("other", ["b", "a"], 0o664, 1000));
        let list = Command::new("tar").args(["--utc", "-tvf"]).arg(folder.join("one.tar.gz")).output().expect("tar");
        fs::remove_dir_all(&folder).expect("it was there");
        assert!(one.starts_with(&[0x1f, 0x8b]), "compressed");
        assert!(one == other, "another time, mode or order shows");
        let list = String::from_utf8(list.stdout).expect("text");
        let words: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
        let file = |name| vec!["-rw-r--r--", "0/0", "0", "2027-01-15", "08:00", name];
        assert_eq!(words[1..], [file("./a"), file("./b")], "{list}");
    }
}
