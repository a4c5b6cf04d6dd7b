// Command node is every Kubernetes program of one node in one binary, so that they share their code on disk and
// in the build. It acts as the program whose name it was called by, or that its first argument names.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var servers = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

// shiftTo drops the binary's own name when the first argument names the program.
func shiftTo(name string) {
	if filepath.Base(os.Args[0]) != name {
		os.Args = os.Args[1:]
	}
}

func program() string {
	name := filepath.Base(os.Args[0])
	if _, known := servers[name]; known || name == "kubectl" {
		return name
	}
	if len(os.Args) > 1 {
		return os.Args[1]
	}
	return ""
}

func main() {
	name := program()
	if name == "kubectl" {
		shiftTo(name)
		if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
			util.CheckErr(err)
		}
		return
	}
	newCommand, known := servers[name]
	if !known {
		fmt.Fprintln(os.Stderr, "usage: node kube-apiserver|kube-controller-manager|kube-proxy|kube-scheduler|kubelet|kubectl ...")
		os.Exit(2)
	}
	shiftTo(name)
	os.Exit(cli.Run(newCommand()))
}
