use clap::CommandFactory;

use super::*;
use crate::cmd::Cli;

const FILE: &str = "/etc/agent.conf";

fn parse(text: &str) -> Result<ConfigFile, String> {
    ConfigFile::parse(Path::new(FILE), text).map_err(|error| error.to_string())
}

/// The arguments from the file, with these given.
fn arguments(text: &str, given: &[&str]) -> Result<Vec<String>, String> {
    let command = Cli::command();
    let line = [&["agent", "run", "--node-name=a"], given].concat();
    let matches = command.clone().try_get_matches_from(line).expect("a command line");
    let run = command.find_subcommand("run").expect("the subcommand");
    let given = matches.subcommand_matches("run").expect("the subcommand");
    parse(text)?.arguments(run, given).map_err(|error| error.to_string())
}

#[test]
fn every_key_stands_for_a_flag() {
    let command = Cli::command();
    let run = command.find_subcommand("run").expect("the subcommand");
    for (section, key, flag) in KEYS {
        let found = run.get_arguments().any(|argument| argument.get_long() == Some(flag));
        assert!(found, "{key} of [{section}]: no --{flag}");
    }
}

#[test]
fn the_users_configuration_is_understood() {
    // As in OVN-Kubernetes' documentation.
    let text = "[ovnkubernetesfeature]\negressip-node-healthcheck-port=9107\n";
    assert_eq!(arguments(text, &[]), Ok(vec!["--egressip-node-healthcheck-port=9107".to_owned()]));
    let text = "\u{feff}; a comment\r\n[OVNKubernetesFeature] # ours\r\n\tEgressIP-Node-HealthCheck-Port = \"9107\" ; gRPC\r\n";
    assert_eq!(arguments(text, &[]), Ok(vec!["--egressip-node-healthcheck-port=9107".to_owned()]));
}

#[test]
fn a_flag_overrides_the_file_and_the_last_line_the_first() {
    let text = "[ovnkubernetesfeature]\negressip-node-healthcheck-port=1\negressip-node-healthcheck-port=2\n";
    assert_eq!(arguments(text, &[]), Ok(vec!["--egressip-node-healthcheck-port=2".to_owned()]));
    assert_eq!(arguments(text, &["--egressip-node-healthcheck-port=3"]), Ok(Vec::new()));
    let empty = "[ovnkubernetesfeature]\negressip-node-healthcheck-port=\n";
    assert_eq!(arguments(empty, &[]), Ok(Vec::new()), "left by a template");
}

#[test]
fn unknown_parts_are_ignored_with_one_warning_each() {
    let text = "[default]\nmtu=1400\nnonsense, but not ours\n[ovnkubernetesfeature]\nenable-egress-ip\n\
                enable-egress-ip=true\nEnable-Multi-Network=true\n[default]\n[gateway \"x\"]\n";
    let file = parse(text).expect("a file");
    assert_eq!(file.settings, []);
    assert_eq!(
        file.warnings,
        [
            "/etc/agent.conf:1: section [default] is ignored: the agent does not use it",
            "/etc/agent.conf:5: enable-egress-ip in [ovnkubernetesfeature] is ignored: the agent does not use it",
            "/etc/agent.conf:7: enable-multi-network in [ovnkubernetesfeature] is ignored: the agent does not use it",
            "/etc/agent.conf:9: section [gateway \"x\"] is ignored: the agent does not use it",
        ]
    );
}

#[test]
fn a_bad_value_is_one_line_with_file_line_and_key_also_if_a_flag_overrides_it() {
    for given in [&[][..], &["--egressip-node-healthcheck-port=9107"]] {
        let bad = |value: &str| {
            arguments(&format!("[ovnkubernetesfeature]\n\negressip-node-healthcheck-port = {value}\n"), given)
        };
        let line = "/etc/agent.conf:3: egressip-node-healthcheck-port";
        assert_eq!(bad("91o7"), Err(format!("{line} = \"91o7\": invalid digit found in string")));
        assert_eq!(bad("70000"), Err(format!("{line} = \"70000\": 70000 is not in 0..=65535")));
        assert_eq!(bad("-1"), Err(format!("{line} = \"-1\": -1 is not in 0..=65535")));
    }
}

#[test]
fn tls_has_its_own_section() {
    let text =
        "[egressip-healthcheck-tls]\nclient-privkey=/k\nclient-cert=/c\nclient-cacert=/ca\ncert-common-name=ovn\n";
    let expected = ["client-privkey=/k", "client-cert=/c", "client-cacert=/ca", "cert-common-name=ovn"];
    assert_eq!(arguments(text, &[]), Ok(expected.map(|rest| format!("--egressip-healthcheck-{rest}")).to_vec()));
    let bad = arguments("[egressip-healthcheck-tls]\nclient-auth=perhaps\n", &[]);
    assert_eq!(bad, Err(format!("{FILE}:2: client-auth = \"perhaps\": it is one of required, off")));
    let bad = arguments("[egressip-healthcheck-tls]\ncert-common-name=a b\n", &[]);
    assert_eq!(bad, Err(format!("{FILE}:2: cert-common-name = \"a b\": neither a DNS name nor an address")));
}

#[test]
fn a_syntax_error_is_one_line_with_file_and_line() {
    let section = "[ovnkubernetesfeature]\n";
    for (text, line) in [
        ("egressip-node-healthcheck-port=1\n", "1: a key before the first [section]"),
        ("[ovnkubernetesfeature\n", "1: a section begins as [name]"),
        ("[ovnkubernetesfeature] port=1\n", "1: a section begins as [name]"),
        (&format!("{section}=1"), "2: this is no key: letters, digits and dashes, then = and the value"),
        (&format!("{section}a_b=1"), "2: this is no key: letters, digits and dashes, then = and the value"),
        (&format!("{section}a=\"1"), "2: the quotes are not closed"),
        (&format!("{section}a=1\\"), "2: after a backslash comes one of \\ \" n t"),
    ] {
        assert_eq!(parse(text), Err(format!("{FILE}:{line}")), "{text:?}");
    }
    let missing = ConfigFile::read(Path::new("/nonexistent/agent.conf")).map_err(|error| error.to_string());
    let line = missing.expect_err("there is none");
    assert!(
        line.starts_with("cannot read /nonexistent/agent.conf: ") && line.ends_with("; check --config-file"),
        "{line}"
    );
}

#[test]
fn values_have_quotes_escapes_and_comments() {
    for (text, expected) in [
        ("plain", "plain"),
        ("  two words  # comment", "two words"),
        ("\" kept \" ; comment", " kept "),
        ("\"a # b\"", "a # b"),
        (r#"a\"b\\c"#, r#"a"b\c"#),
        ("", ""),
    ] {
        assert_eq!(value(text).as_deref(), Ok(expected), "{text:?}");
    }
}
