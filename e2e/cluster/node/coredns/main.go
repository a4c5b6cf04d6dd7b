// Command coredns is the cluster's DNS with only the plugins that its Corefile uses.
package main

import (
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func main() {
	// The order in which a query passes the plugins.
	dnsserver.Directives = []string{"health", "ready", "errors", "cache", "kubernetes", "loop", "forward"}
	coremain.Run()
}
